"""A causal convolution over streamed audio, with the previous frames as state; not an LLM.

    python examples/aliased_io_streaming_conv.py
    python examples/aliased_io_streaming_conv.py --backend aot

The convolution has 3 taps with a dilation of 960, so it needs the last 1,920 frames. Two implementations are compared,
both in one storage: shifting the frames at every step, as most code does, which copies all of them and is reported; and
a ring buffer, which writes only the new frames.
"""

from __future__ import annotations

import sys

import torch
from showing import PAGE_SIZE, check, check_in_place, measure, parse_backend, print_bindings
from torch import Tensor, nn
from torch.nn import functional

from inlay import Example
from inlay.frontend import capture
from inlay.lowering.compiled_program import compile_program
from inlay.package.memory_profiler import allocate_paged

CHANNELS, TAPS, DILATION, CHUNK = 32, 3, 960, 32
HISTORY_FRAMES = (TAPS - 1) * DILATION
"""Number of previous frames that the convolution reads."""
CHUNKS = 150
"""More than two rounds of the ring buffer."""


class ShiftState(nn.Module):
    """State [batch, frames, channels]: the last frames, oldest first, shifted by a chunk at every step."""

    frames = HISTORY_FRAMES

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, state: Tensor, chunk: Tensor, at: Tensor) -> Tensor:
        frames = torch.cat([state, chunk], 1)
        state.copy_(frames[:, CHUNK:])
        return functional.conv1d(frames.transpose(1, 2), self.weight, dilation=DILATION).transpose(1, 2)


class RingBuffer(ShiftState):
    """The same frames without shifting; a new chunk overwrites the oldest frames."""

    frames = HISTORY_FRAMES + CHUNK

    def forward(self, state: Tensor, chunk: Tensor, at: Tensor) -> Tensor:
        new = at + torch.arange(CHUNK)
        state.index_copy_(1, new % self.frames, chunk)
        taps = [state[:, (new - (TAPS - 1 - tap) * DILATION) % self.frames] for tap in range(TAPS)]
        return torch.einsum("kbfi,oik->bfo", torch.stack(taps), self.weight)


def check_stream(form: type[ShiftState], name: str, weight: Tensor, sound: Tensor, wanted: Tensor) -> bool:
    first = (torch.zeros(1, form.frames, CHANNELS), sound[:, :CHUNK], torch.tensor(0))
    step = compile_program(capture(Example(form(weight), first)), name)
    print_bindings(step)

    state, made = allocate_paged((1, form.frames, CHANNELS)), []
    place = state.data_ptr()
    for index, chunk in enumerate(torch.split(sound, CHUNK, 1)):
        at = torch.tensor(index * CHUNK)
        made.append(step(state, chunk, at))
    apart = (torch.cat(made, 1) - wanted).abs().max().item()
    moved = measure("state", lambda: step(state, chunk, at), state)
    fresh = CHUNK * CHANNELS * 4
    claims = [
        check_in_place(step) if form is RingBuffer else check("the copy is reported", len(step.remarks) == 1),
        check("the address of the state is unchanged", state.data_ptr() == place),
        check(f"{CHUNKS} chunks equal eager convolution of the whole input, within {apart:.1e}", apart < 1e-5),
    ]
    if form is RingBuffer:
        claims.append(check("only the new frames are written", 0 < moved.written_bytes <= fresh + PAGE_SIZE))
        claims.append(check("nothing as large as the state is copied", moved.copied_bytes(state.nbytes) == 0))
    else:
        claims.append(
            check("the whole state is written, because all frames are shifted", moved.written_bytes == state.nbytes)
        )
        claims.append(
            check(
                "there is no second state; only the input of conv1d is copied",
                state.nbytes not in moved.allocation_sizes,
            )
        )
    return all(claims)


def main(arguments: list[str] | None = None) -> int:
    name = parse_backend(__doc__, arguments)
    torch.manual_seed(0)
    with torch.no_grad():
        weight, sound = torch.randn(CHANNELS, CHANNELS, TAPS) / 10, torch.randn(1, CHUNKS * CHUNK, CHANNELS)
        padded = functional.pad(sound.transpose(1, 2), (HISTORY_FRAMES, 0))
        wanted = functional.conv1d(padded, weight, dilation=DILATION).transpose(1, 2)
        print("# Shifted at every step\n")
        fine = check_stream(ShiftState, name, weight, sound, wanted)
        print("\n# Ring buffer\n")
        fine &= check_stream(RingBuffer, name, weight, sound, wanted)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
