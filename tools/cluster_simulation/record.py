"""Records the step durations of a real engine with one thread, and fits `StepTimes` to them.

With `--processes 2`, two engines record at the same time: they share caches and memory bandwidth as replicas on one
machine do. As a check, random requests are then run on the engines and on their simulation, step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.runtime.engine import Engine
from inlay.runtime.request import Request
from inlay.runtime.settings import EngineSettings
from tools.cluster_simulation.engine import SimulatedEngine
from tools.cluster_simulation.step_times import EngineShape, Recording, StepTimes, fit_decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.runtime.request import RequestHandle

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.thread_time}
"""On an idle machine both agree, because one thread computes. `cpu` leaves out the time that other processes take."""
LENGTHS = (32, 256, 512, 1024, 1536, 1920)
"""Context lengths of the decode samples."""
CHUNKS = (1, 8, 16, 32, 64, 128, 256, 512)
STARTS = (0, 512, 1024, 1472)
"""Chunk sizes and start positions of the prefill samples; starts are multiples of the block size."""
_VOCABULARY = range(1000, 20000)


def engine_shape(engine: Engine) -> EngineShape:
    """Return the limits of an engine."""
    places = (0, 0) if engine.cache is None else (*engine.cache.capacities, 0)  # an empty cache is false
    settings = engine.settings
    return EngineShape(
        slots=engine.slots,
        max_seq_len=engine.max_seq_len,
        max_waiting=settings.max_waiting,
        max_prefill_tokens=settings.max_prefill_tokens,
        max_prefill_only_tokens=settings.max_prefill_only_tokens,
        block_size=settings.block_size,
        cache_blocks=places[0],
        host_blocks=places[1],
        batches=engine._limits.batches,
        can_store_generated=engine._prefix_cache._can_store_generated,
    )


def _prompt(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(_VOCABULARY, k=count))


def _submit(engine: Engine, prompt: tuple[int, ...], count: int) -> RequestHandle:
    return engine.submit(Request(prompt, max_tokens=count, ignore_eos=True))


def _timed_step(engine: Engine, clock: Clock) -> float:
    started = clock()
    engine.step()
    return clock() - started


def decode_samples(engine: Engine, clock: Clock, steps: int, rng: random.Random) -> list[tuple[int, int, float]]:
    """Return batch, mean cached tokens in total and median seconds of decode steps."""
    found = []
    for length in (each for each in LENGTHS if each + steps + engine.slots < engine.max_seq_len):
        prompt = _prompt(rng, length)
        for batch in range(1, engine.slots + 1):
            handles = [_submit(engine, prompt, steps + 2 * engine.slots + 4) for _ in range(batch)]
            while engine._waiting or any(each.prefill_tokens_left for each in engine._running.values()):
                engine.step()
            engine.step()
            first = sum(each.computed_tokens for each in engine._running.values())
            seconds = statistics.median(_timed_step(engine, clock) for _ in range(steps))
            assert len(engine._running) == batch, "a sequence ended too early"
            found.append((batch, first + batch * (steps - 1) // 2, seconds))
            for each in handles:
                each.cancel()
            engine.step()
    return found


def load_seconds(engine: Engine, clock: Clock, rounds: int = 200) -> float:
    """Return the seconds to copy one cached block into a slot."""
    if engine.cache is None:
        return 0.0
    started = clock()
    for each in range(rounds):
        engine._memory.load(each % engine.slots, 0, 0, each % engine.cache.capacities[0])
    return (clock() - started) / rounds


def prefill_samples(engine: Engine, clock: Clock, rounds: int, rng: random.Random) -> list[tuple[int, int, float]]:
    """Return chunk size, start and median seconds of prefill steps whose earlier tokens are cached."""
    found = []
    for start in (each for each in STARTS if each + max(CHUNKS) < engine.max_seq_len):
        prefix = _prompt(rng, start)
        for chunk in CHUNKS:
            seconds: list[float] = []
            for _ in range(rounds + 1):
                _submit(engine, (*prefix, *_prompt(rng, chunk)), 1)
                if start and len(seconds) == 0 and chunk == CHUNKS[0]:  # fill the cache
                    while engine.step():
                        pass
                    _submit(engine, (*prefix, *_prompt(rng, chunk)), 1)
                engine.step()  # admits
                seconds.append(_timed_step(engine, clock))
                while engine.step():
                    pass
            found.append((chunk, start, statistics.median(seconds[1:])))
    return found


def fit(shape: EngineShape, samples: dict[str, Any]) -> tuple[StepTimes, dict[str, float]]:
    """Return step times from samples, and the relative error of the decode fit."""
    decode, prefill = _medians(samples["decode"]), _medians(samples["prefill"])
    base, row = fit_decode([(*key, seconds) for key, seconds in decode.items()], shape.slots)
    load = samples["load_seconds"]
    chunks, starts = (tuple(sorted({key[part] for key in prefill})) for part in (0, 1))
    table = tuple(
        tuple(prefill[chunk, start] - load * (start // shape.block_size) for start in starts) for chunk in chunks
    )
    times = StepTimes(tuple(base), tuple(row), chunks, starts, table, load, samples["empty_step"])
    errors = [abs(times.decode(*key) / seconds - 1) for key, seconds in decode.items()]
    return times, {"decode_mean": statistics.fmean(errors), "decode_most": max(errors)}


def _medians(samples: Sequence[tuple[int, int, float]]) -> dict[tuple[int, int], float]:
    """Return the median seconds of each case, of all processes and passes."""
    known: dict[tuple[int, int], list[float]] = {}
    for first, second, seconds in samples:
        known.setdefault((first, second), []).append(seconds)
    return {key: statistics.median(values) for key, values in known.items()}


def check(engine: Engine, clock: Clock, times: StepTimes, seed: int, requests: int = 16) -> dict[str, float]:
    """Run random requests on the engine and on its simulation; return the errors of the predicted durations."""
    rng = random.Random(seed)
    simulated = SimulatedEngine(engine_shape(engine), times, lambda event: None)
    assert engine.cache is None or not engine._running
    if engine.cache is not None:
        engine.cache.clear()
    shared = _prompt(rng, 300)
    due = sorted((rng.randrange(300), number) for number in range(requests))
    pairs, number = [], 0
    while due or engine._waiting or engine._running:
        while due and (due[0][0] <= number or not (engine._waiting or engine._running)):
            due.pop(0)
            prompt = (*shared[: rng.randrange(300)], *_prompt(rng, rng.randint(8, 600)))
            count = rng.randint(8, 96)
            _submit(engine, prompt, count)
            simulated.submit(Request(prompt, max_tokens=count, ignore_eos=True), [0] * count)
        step = simulated.step(0.0, 1)
        assert step is not None
        simulated.complete(step, 1)
        pairs.append((_timed_step(engine, clock), step.ends[0]))
        number += 1
    measured, predicted = (sum(each) for each in zip(*pairs, strict=True))
    errors = sorted(abs(two / one - 1) for one, two in pairs if one > 1e-3)
    return {
        "check_total": predicted / measured - 1,
        "check_weighted": sum(abs(two - one) for one, two in pairs) / measured,
        "check_step_p50": errors[len(errors) // 2],
        "check_steps": len(pairs),
    }


def record_here(given: argparse.Namespace) -> Recording:
    """Record an engine in this process."""
    engine = Engine.open(given.package, EngineSettings(cache_bytes=given.cache_bytes, speculation=0))
    engine._warm_up()
    clock, rng = CLOCKS[given.clock], random.Random(given.seed)
    _submit(engine, _prompt(rng, 64), 32)
    while engine.step():
        pass
    started = time.perf_counter()
    samples: dict[str, Any] = {"load_seconds": load_seconds(engine, clock)}
    for name in ("prefill", "decode"):
        samples[name] = []
    for _ in range(given.passes):  # spread over time, because other processes may disturb some of them
        samples["prefill"] += prefill_samples(engine, clock, given.rounds, rng)
        samples["decode"] += decode_samples(engine, clock, given.steps, rng)
    _submit(engine, _prompt(rng, 8), 1)
    samples["empty_step"] = _timed_step(engine, clock)
    while engine.step():
        pass
    shape = engine_shape(engine)
    times, error = fit(shape, samples)
    engine.close()
    return Recording(shape, times, error, {"seconds": time.perf_counter() - started}, samples)


def _merge(found: Sequence[dict[str, Any]], clock: str) -> Recording:
    """Merge the samples of several processes and fit all of them."""
    shape = Recording.parse(found[0]).shape
    samples: dict[str, Any] = {
        name: [row for each in found for row in each["samples"][name]] for name in ("prefill", "decode")
    }
    for name in ("load_seconds", "empty_step"):
        samples[name] = statistics.fmean(each["samples"][name] for each in found)
    times, error = fit(shape, samples)
    about = {
        "processes": len(found),
        "clock": clock,
        "seconds": found[0]["about"]["seconds"],
        "load_average": os.getloadavg()[0],
    }
    return Recording(shape, times, error, about, samples)


def check_here(given: argparse.Namespace) -> dict[str, float]:
    """Check the step times of a file with an engine in this process."""
    engine = Engine.open(given.package, EngineSettings(cache_bytes=given.cache_bytes, speculation=0))
    engine._warm_up()
    found = check(engine, CLOCKS[given.clock], Recording.read(given.check).times, given.seed)
    engine.close()
    return found


def _in_processes(given: argparse.Namespace, *more: str) -> list[dict[str, Any]]:
    """Return what several processes with one thread each print, that run at the same time."""
    command = [sys.executable, "-m", "tools.cluster_simulation.record", str(given.package), "--steps", str(given.steps)]
    command += ["--rounds", str(given.rounds), "--passes", str(given.passes), "--clock", given.clock, *more]
    if given.cache_bytes is not None:
        command += ["--cache-bytes", str(given.cache_bytes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([*command, "--seed", str(number)], stdout=subprocess.PIPE, env=environment, text=True)
        for number in range(given.processes)
    ]
    told = [each.communicate()[0] for each in started]
    if any(each.returncode for each in started):
        raise SystemExit("A recording process failed.")
    return [json.loads(each) for each in told]


def run(given: argparse.Namespace) -> None:
    """Record in new processes, and check the fit in others."""
    recording = _merge(_in_processes(given), given.clock)
    recording.write(given.out)
    checks = _in_processes(given, "--check", str(given.out))
    recording.error.update({name: statistics.fmean(each[name] for each in checks) for name in checks[0]})
    recording.write(given.out)
    print(json.dumps(recording.error, indent=1))
    if problem := recording.problem:
        raise SystemExit(f"{problem} Record again on an idle machine.")


def _add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("package", type=Path)
    options.add_argument("--steps", type=int, default=16, help="timed decode steps of each sample")
    options.add_argument("--rounds", type=int, default=1, help="timed prefills of each sample")
    options.add_argument("--passes", type=int, default=3, help="how often all samples are taken")
    options.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: if other processes run")
    options.add_argument("--cache-bytes", type=int, help="memory of the prefix cache; default: that of the slots")


def add_command(commands: Any) -> None:
    """Add the subcommand `record`."""
    options = commands.add_parser("record", help="record the step durations of a real engine")
    _add_options(options)
    options.add_argument("out", type=Path)
    options.add_argument("--processes", type=int, default=1, help="engines that record at the same time")
    options.set_defaults(run=run)


if __name__ == "__main__":
    _options = argparse.ArgumentParser(description=__doc__)
    _add_options(_options)
    _options.add_argument("--seed", type=int, default=0)
    _options.add_argument("--check", type=Path, help="check this recording instead")
    _given = _options.parse_args()
    print(json.dumps(check_here(_given) if _given.check else asdict(record_here(_given))))
