"""gated_short_conv in Triton: its numbers in the interpreter, and that it compiles for GPUs. It was not timed."""

from __future__ import annotations

import pytest

from inlay.testing.triton import ARCHITECTURES, compile_to_ptx, run_interpreted

pytest.importorskip("triton")


def test_numbers() -> None:
    printed = run_interpreted(
        """
        import torch
        from inlay.ops.short_conv import gated_short_conv
        from inlay.ops.short_conv_triton import launch

        generator = torch.Generator().manual_seed(0)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
            for batch, length, channels, taps in ((1, 1, 8, 3), (2, 7, 37, 4), (3, 300, 5, 2)):
                x = torch.randn(batch, length, 3 * channels, generator=generator).to(dtype)
                weight = torch.randn(channels, 1, taps, generator=generator).to(dtype)
                expected = gated_short_conv(x.double(), weight.double())
                torch.testing.assert_close(launch(x, weight).double(), expected, rtol=tolerance, atol=tolerance)
                wide = torch.randn(batch, length + 2, 3 * channels, generator=generator).to(dtype)[:, 1:-1]
                expected = gated_short_conv(wide.double(), weight.double())
                torch.testing.assert_close(launch(wide, weight).double(), expected, rtol=tolerance, atol=tolerance)
                print(dtype, batch, length)
        """,
        __file__,
    )
    assert len(printed.splitlines()) == 9, "three dtypes, three sizes"


def test_a_wrong_number_is_noticed() -> None:
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run_interpreted(
            """
            import torch
            from inlay.ops.short_conv import gated_short_conv
            from inlay.ops.short_conv_triton import launch

            x, weight = torch.randn(1, 5, 12), torch.randn(4, 1, 3)
            torch.testing.assert_close(launch(x, weight.flip(-1)), gated_short_conv(x, weight))
            """,
            __file__,
        )


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("pointer", ["*fp32", "*fp16", "*bf16"])
def test_compiles(capability: int, pointer: str) -> None:
    from inlay.ops.short_conv_triton import kernel

    numbers = ("numel", "length", "channels", "batch_stride", "row_stride")
    signature = dict.fromkeys(("x_ptr", "w_ptr", "out_ptr"), pointer) | dict.fromkeys(numbers, "i32")
    signature |= {"TAPS": "constexpr", "BLOCK": "constexpr"}
    text = compile_to_ptx(capability, kernel, signature, {"TAPS": 3, "BLOCK": 256})
    assert f".target sm_{capability}" in text
