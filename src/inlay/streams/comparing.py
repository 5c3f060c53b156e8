"""Comparing: a program planned for lanes, then run in one, in several, and in one with several intra-op threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import torch

from inlay.streams.bound import bound_program
from inlay.streams.execute import Overlapped, open_lanes
from inlay.streams.from_program import work_of_program
from inlay.streams.measuring import measured_calls, measured_event
from inlay.streams.picture import draw
from inlay.streams.pieces import grouped, joined
from inlay.streams.planning import edges_across, predicted, schedule
from inlay.streams.schedules import in_order
from inlay.streams.work import Life

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from inlay.program.program import Program
    from inlay.streams.bound import Bound
    from inlay.streams.schedules import Schedule
    from inlay.streams.timeline import Timeline
    from inlay.streams.work import Work

    Way = Callable[[Mapping[str, Any]], Any]

WORTH = 4
"""A piece takes at least so many times as long as an event."""
UNCOUNTED = 2
"""Rounds that only warm up."""
REST = 0.02
"""Seconds between two ways: threads of OpenMP that have nothing left to do keep a core busy for a while."""
TIMED = 5
"""Runs of which the quickest is the timeline."""
ONE = "one lane"


@contextmanager
def intra_op(threads: int) -> Iterator[Callable[..., Any]]:
    """Calls in a thread that keeps so many intra-op threads: to change their number costs more than a call.

    >>> with intra_op(1) as call:
    ...     call(torch.get_num_threads)
    1
    """

    def begin() -> None:
        torch.get_num_threads()  # the first time, a thread is given what torch keeps for new ones: that must be over
        torch.set_num_threads(threads)

    try:
        with ThreadPoolExecutor(1, initializer=begin) as thread:
            yield lambda call, *given: thread.submit(call, *given).result()
    finally:
        torch.set_num_threads(torch.get_num_threads())  # threads yet to come begin with what the caller has


@dataclass(frozen=True, eq=False)
class Planned:
    """Work of a program that can be run, and a schedule of it."""

    bound: Bound
    schedule: Schedule
    operators: int
    edges: int
    """Pairs of pieces in two lanes that must stay in order, before pieces were joined."""
    event: float
    """Seconds that an event was planned with."""

    @property
    def work(self) -> Work:
        """The pieces."""
        return self.bound.work

    def fresh(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The same inputs with copies of the states: each run begins where the others began."""
        states = {each.name for each in self.work.storages if each.life is Life.STATE}
        return {name: value.clone() if name in states else value for name, value in given.items()}

    def figures(self) -> dict[str, int | float | None]:
        """What the plan is and promises, by name."""
        events = len(self.schedule.events)
        end = max((end for _, end in predicted(self.work, self.schedule, self.event).values()), default=0.0)
        return {
            "operators": self.operators,
            "pieces": len(self.work),
            "lanes": len(self.schedule.lanes),
            "edges": self.edges,
            "events": events,
            "events_over_edges": events / self.edges if self.edges else None,
            "recorded": len(self.schedule.recorded),
            "planned_over_in_order": end / self.work.seconds if self.work.seconds else None,
        }


def planned(program: Program, given: Mapping[str, Any], lanes: int = 2, event: float | None = None) -> Planned:
    """Measure the operators of a program with one intra-op thread, put them together to pieces, and schedule these.

    The program must write its states itself (`inlay.state.in_place`); `given` are its inputs and states by name.
    `event` is how many seconds an event takes; if it is not given, it is measured.
    """
    event = measured_event() if event is None else event
    with intra_op(1) as call:
        operators = work_of_program(program, call(measured_calls, program, given))
    pieces = grouped(operators, WORTH * event)
    listed = schedule(pieces, lanes=lanes, event_seconds=event)
    work, made = joined(pieces, listed)
    return Planned(bound_program(program, work), made, len(operators), len(edges_across(pieces, listed)), event)


@dataclass(frozen=True)
class Compared:
    """What rounds of several ways took, and whether lanes gave what one lane gives."""

    same: bool
    """Results and states of lanes are exactly those of one lane."""
    seconds: Mapping[str, list[float]]
    """Way → its seconds, round by round."""
    lanes: str
    """The way that ran the schedule; `ONE` where the schedule is one lane."""
    timeline: Timeline

    def over(self, way: str, other: str = ONE) -> list[float]:
        """A way against another, round by round."""
        return [one / two for one, two in zip(self.seconds[way], self.seconds[other], strict=True)]

    def figures(self) -> dict[str, dict[str, float]]:
        """Way → medians and spread of its seconds, and the median of it against one lane."""
        return {
            way: {
                "median": median(each),
                "lowest": min(each),
                "highest": max(each),
                "over_one_lane": median(self.over(way)),
            }
            for way, each in self.seconds.items()
        }

    @property
    def ratio(self) -> float:
        """The median of lanes against one lane; 1 where the schedule is one lane."""
        return median(self.over(self.lanes))

    @property
    def pays(self) -> bool | None:
        """Whether lanes are quicker than every other way; None where less than three of four rounds agree."""
        if self.lanes == ONE:
            return False
        best = min((way for way in self.seconds if way != self.lanes), key=lambda way: median(self.seconds[way]))
        low, _, high = quantiles(self.over(self.lanes, best), n=4, method="inclusive")
        return True if high < 1 else False if low >= 1 else None

    def __str__(self) -> str:
        if self.lanes == ONE:
            return "Lanes do not pay here: no plan for them promises to be quicker than one lane."
        begin = {True: "Lanes pay here.", False: "Lanes do not pay here.", None: "Rounds differ too much to say."}
        ways = (f"{way} × {median(self.over(way)):.2f}" for way in self.seconds if way != ONE)
        return f"{begin[self.pays]} Against one lane: {', '.join(ways)}."


def compare(
    plan: Planned,
    given: Mapping[str, Any],
    *,
    threads: int = 2,
    rounds: int = 10,
    device: torch.device | str = "cpu",
    on_round: Callable[[int], None] = lambda number: None,
) -> Compared:
    """Run a plan in one lane, in its lanes and, on a CPU, in one lane with so many intra-op threads, in turns.

    Whatever else the machine does, it does to all of them. A schedule that races is refused. `given` stays as it is.
    """
    with ExitStack() as stack:
        lanes = stack.enter_context(closing(open_lanes(len(plan.schedule.lanes), device)))
        one, several = (Overlapped(plan.bound, made, lanes) for made in (in_order(plan.work), plan.schedule))
        name = f"{len(lanes)} lanes" if len(lanes) > 1 else ONE
        ways: dict[str, Way] = {ONE: one, name: several}
        if torch.device(device).type == "cpu":
            call = stack.enter_context(intra_op(threads))
            ways[f"one lane with {threads} intra-op threads"] = lambda values: call(plan.bound, values)
        same = _same(_run(several, plan.fresh(given)), _run(one, plan.fresh(given)))
        times = in_rounds(ways, lambda: plan.fresh(given), rounds, on_round)
        timelines = [several.timed(plan.fresh(given))[1] for _ in range(TIMED)]
    return Compared(same, times, name, min(timelines, key=lambda each: each.seconds))


def in_rounds(
    ways: Mapping[str, Way],
    fresh: Callable[[], dict[str, Any]],
    rounds: int,
    on_round: Callable[[int], None] = lambda number: None,
) -> dict[str, list[float]]:
    """Seconds of a call of each way, round by round, each with inputs and states of its own.

    The call before it is not counted, and follows a rest: nothing of another way is still at work, and all is awake.
    """
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(1 - UNCOUNTED, rounds + 1):
        on_round(number)
        for way, run in ways.items():
            sleep(REST)
            _finish(run, fresh())
            values = fresh()
            start = perf_counter()
            _finish(run, values)
            if number > 0:
                times[way].append(perf_counter() - start)
    return times


def files_of(plan: Planned, compared: Compared, title: str) -> dict[str, str]:
    """File name → text of all that is to be kept. Pieces depend on times: a schedule belongs to the work beside it."""
    return {
        "work.json": plan.work.text(),
        "schedule.json": plan.schedule.text(),
        "trace.json": compared.timeline.trace(),
        "timeline.json": compared.timeline.text(),
        "lanes.svg": draw(compared.timeline, title),
    }


def _run(way: Way, values: dict[str, Any]) -> list[Any]:
    """What a way returns, and what it was given as it is then; random numbers are the same for all ways."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return [*_finish(way, values), *values.values()]


def _finish(way: Way, values: dict[str, Any]) -> Any:
    """A call and all it launched on a device."""
    made = way(values)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return made


def _same(one: list[Any], two: list[Any]) -> bool:
    return [_bits(each) for each in one] == [_bits(each) for each in two]


def _bits(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.dtype, value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
