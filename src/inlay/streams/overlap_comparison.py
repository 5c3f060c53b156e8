"""Comparison of a program in one lane, in several lanes, and in one lane with several intra-op threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import torch

from inlay.streams.access_sets import build_work
from inlay.streams.bound_work import bind_program
from inlay.streams.executor import ScheduledExecution, open_executor
from inlay.streams.list_scheduler import cross_lane_edges, plan_schedule, predict_times
from inlay.streams.schedule import serial_schedule
from inlay.streams.task_grouping import group_tasks, merge_between_events
from inlay.streams.timeline_svg import draw_timeline
from inlay.streams.timing import measure_calls, measure_event
from inlay.streams.work_graph import Lifetime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from inlay.program.program import Program
    from inlay.streams.bound_work import BoundWork
    from inlay.streams.schedule import Schedule
    from inlay.streams.timeline import Timeline
    from inlay.streams.work_graph import WorkGraph

    Way = Callable[[Mapping[str, Any]], Any]

MIN_TASK_EVENTS = 4
"""The minimum duration of a piece, in event durations."""
WARMUP_ROUNDS = 2
"""Rounds that are not measured."""
REST = 0.02
"""Seconds of sleep before each measurement, because idle OpenMP threads keep a core busy for a while."""
TIMELINE_RUNS = 5
"""Runs for the timeline; the fastest one is used."""
ONE = "one lane"


@contextmanager
def intra_op(threads: int) -> Iterator[Callable[..., Any]]:
    """Run calls in a thread with a fixed number of intra-op threads, because changing it costs more than a call.

    >>> with intra_op(1) as call:
    ...     call(torch.get_num_threads)
    1
    """

    def begin() -> None:
        torch.get_num_threads()  # its first call in a thread applies torch's default: do that before setting the number
        torch.set_num_threads(threads)

    try:
        with ThreadPoolExecutor(1, initializer=begin) as thread:
            yield lambda call, *given: thread.submit(call, *given).result()
    finally:
        torch.set_num_threads(torch.get_num_threads())  # restore the default for new threads


@dataclass(frozen=True, eq=False)
class OverlapPlan:
    """Bound work of a program and a schedule of it."""

    bound_work: BoundWork
    schedule: Schedule
    operators: int
    edges: int
    """Dependencies between pieces in different lanes, before pieces were merged."""
    event_seconds: float
    """The duration of an event that the plan assumes."""

    @property
    def work(self) -> WorkGraph:
        """The pieces."""
        return self.bound_work.work

    def copy_states(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs with copies of the states, so that each run begins with the same state."""
        states = {each.name for each in self.work.storages if each.lifetime is Lifetime.STATE}
        return {name: value.clone() if name in states else value for name, value in given.items()}

    def metrics(self) -> dict[str, int | float | None]:
        """Return size and predicted time of the plan, by name."""
        events = len(self.schedule.events)
        end = max((end for _, end in predict_times(self.work, self.schedule, self.event_seconds).values()), default=0.0)
        return {
            "operators": self.operators,
            "pieces": len(self.work),
            "lanes": len(self.schedule.lanes),
            "edges": self.edges,
            "events": events,
            "events_over_edges": events / self.edges if self.edges else None,
            "recorded": len(self.schedule.recorded_storages),
            "planned_over_in_order": end / self.work.seconds if self.work.seconds else None,
        }


def plan_overlap(
    program: Program, inputs: Mapping[str, Any], lanes: int = 2, event_seconds: float | None = None
) -> OverlapPlan:
    """Measure the operators of a program with one intra-op thread, group them into pieces, and schedule the pieces.

    The program must write its states in place (`inlay.lowering.state.write_in_place`). `inputs` are its inputs and
    states by name. `event_seconds` is the duration of an event; by default it is measured.
    """
    event_seconds = measure_event() if event_seconds is None else event_seconds
    with intra_op(1) as call:
        operators = build_work(program, call(measure_calls, program, inputs))
    pieces = group_tasks(operators, MIN_TASK_EVENTS * event_seconds)
    listed = plan_schedule(pieces, lanes=lanes, event_seconds=event_seconds)
    work, made = merge_between_events(pieces, listed)
    return OverlapPlan(
        bind_program(program, work), made, len(operators), len(cross_lane_edges(pieces, listed)), event_seconds
    )


@dataclass(frozen=True)
class OverlapComparison:
    """Measured times of each configuration, and whether the results are identical."""

    is_identical: bool
    """Results and states of several lanes are bitwise those of one lane."""
    seconds: Mapping[str, list[float]]
    """Configuration → seconds of each round."""
    lanes_name: str
    """The configuration that ran the schedule; `ONE` if the schedule has one lane."""
    timeline: Timeline

    def ratios(self, way: str, other: str = ONE) -> list[float]:
        """Return the time ratio of two configurations in each round."""
        return [one / two for one, two in zip(self.seconds[way], self.seconds[other], strict=True)]

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return for each configuration median, minimum and maximum seconds, and the median ratio to one lane."""
        return {
            way: {
                "median": median(each),
                "lowest": min(each),
                "highest": max(each),
                "over_one_lane": median(self.ratios(way)),
            }
            for way, each in self.seconds.items()
        }

    @property
    def ratio(self) -> float:
        """The median time ratio of the lanes to one lane; 1 if the schedule has one lane."""
        return median(self.ratios(self.lanes_name))

    @property
    def is_faster(self) -> bool | None:
        """Whether lanes are faster than all other configurations; None if less than three of four rounds agree."""
        if self.lanes_name == ONE:
            return False
        best = min((way for way in self.seconds if way != self.lanes_name), key=lambda way: median(self.seconds[way]))
        low, _, high = quantiles(self.ratios(self.lanes_name, best), n=4, method="inclusive")
        return True if high < 1 else False if low >= 1 else None

    def __str__(self) -> str:
        if self.lanes_name == ONE:
            return "Lanes are not faster here: no schedule is predicted to be faster than one lane."
        begin = {
            True: "Lanes are faster here.",
            False: "Lanes are not faster here.",
            None: "The result is inconclusive: the rounds differ too much.",
        }
        ways = (f"{way} × {median(self.ratios(way)):.2f}" for way in self.seconds if way != ONE)
        return f"{begin[self.is_faster]} Time relative to one lane: {', '.join(ways)}."


def compare_lanes(
    plan: OverlapPlan,
    inputs: Mapping[str, Any],
    *,
    threads: int = 2,
    rounds: int = 10,
    device: torch.device | str = "cpu",
    on_round: Callable[[int], None] = lambda number: None,
) -> OverlapComparison:
    """Run a plan in one lane, in its lanes and, on a CPU, in one lane with `threads` intra-op threads, alternating.

    Alternating spreads other load over all configurations. A schedule with races is rejected. `inputs` is unchanged.
    """
    with ExitStack() as stack:
        lanes = stack.enter_context(closing(open_executor(len(plan.schedule.lanes), device)))
        one, several = (
            ScheduledExecution(plan.bound_work, made, lanes) for made in (serial_schedule(plan.work), plan.schedule)
        )
        name = f"{len(lanes)} lanes" if len(lanes) > 1 else ONE
        ways: dict[str, Way] = {ONE: one, name: several}
        if torch.device(device).type == "cpu":
            call = stack.enter_context(intra_op(threads))
            ways[f"one lane with {threads} intra-op threads"] = lambda values: call(plan.bound_work, values)
        same = _is_identical(_run(several, plan.copy_states(inputs)), _run(one, plan.copy_states(inputs)))
        times = time_rounds(ways, lambda: plan.copy_states(inputs), rounds, on_round)
        timelines = [several.run_timed(plan.copy_states(inputs))[1] for _ in range(TIMELINE_RUNS)]
    return OverlapComparison(same, times, name, min(timelines, key=lambda each: each.seconds))


def time_rounds(
    ways: Mapping[str, Way],
    make_inputs: Callable[[], dict[str, Any]],
    rounds: int,
    on_round: Callable[[int], None] = lambda number: None,
) -> dict[str, list[float]]:
    """Return the seconds of one call of each configuration in each round, each with its own inputs and states.

    Each measured call follows a rest and a call that is not counted, so no thread of another configuration is active.
    """
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(1 - WARMUP_ROUNDS, rounds + 1):
        on_round(number)
        for way, run in ways.items():
            sleep(REST)
            _finish(run, make_inputs())
            values = make_inputs()
            start = perf_counter()
            _finish(run, values)
            if number > 0:
                times[way].append(perf_counter() - start)
    return times


def output_files(plan: OverlapPlan, compared: OverlapComparison, title: str) -> dict[str, str]:
    """Return file name → text of all output files. Pieces depend on measured times: keep work and schedule together."""
    return {
        "work.json": plan.work.to_json(),
        "schedule.json": plan.schedule.to_json(),
        "trace.json": compared.timeline.trace(),
        "timeline.json": compared.timeline.to_json(),
        "lanes.svg": draw_timeline(compared.timeline, title),
    }


def _run(way: Way, values: dict[str, Any]) -> list[Any]:
    """Return results and inputs after a run, with the same random seed for all configurations."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return [*_finish(way, values), *values.values()]


def _finish(way: Way, values: dict[str, Any]) -> Any:
    """Run a call and wait for all device work."""
    made = way(values)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return made


def _is_identical(one: list[Any], two: list[Any]) -> bool:
    return [_bits(each) for each in one] == [_bits(each) for each in two]


def _bits(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.dtype, value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
