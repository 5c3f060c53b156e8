"""`check_model` notices every kind of wrong: each backend here computes one thing wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from inlay.errors import UsageError
from inlay.testing import check_model
from tests.models import LLAMA, random_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inlay.testing.inputs import Inputs

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


class Model(torch.nn.Module):
    """A linear layer, a transposed output, a counter."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 6)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps.add_(1)
        made = self.linear(x)
        return {"made": made.relu(), "turned": made.t(), "best": made.argmax(-1)}


def inputs() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, 4, generator=generator),) for rows in (3, 5, 7)]


def wrong(change: Callable[[torch.Tensor], torch.Tensor], at: int = 0) -> Callable[..., Any]:
    """A backend that changes one output of every graph."""

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            outputs = list(module(*args))
            places = [index for index, each in enumerate(outputs) if each.is_floating_point() and each.dim() == 2]
            outputs[places[at]] = change(outputs[places[at]])
            return outputs

        return run

    return backend


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 1.5


def test_a_good_backend_passes() -> None:
    made = check_model(Model(), inputs(), backend="aot_eager")
    assert (made.runs, made.values) == (12, 12 * 13 + 6 * 2)
    assert made.frames == 2 * 2 * 2, "two dtypes, with gradients and without; the third size is served by the second"


def test_inductor_passes() -> None:
    assert check_model(Model(), inputs()[:1], dtypes=(torch.bfloat16,), gradients=False).runs == 1


def test_the_backend_of_inlay_passes() -> None:
    made = check_model(Model(), inputs()[:2], backend="inlay", dtypes=(torch.float32,))
    assert made.runs == 2, "it has no gradients"


@pytest.mark.parametrize(
    ("backend", "what", "kind"),
    [
        (wrong(lambda x: x * 1.1), r"output\['made'\]", "value"),
        (wrong(lambda x: x.masked_fill(x == x.max(), torch.nan)), r"output\['made'\]", "value .*not finite"),
        (wrong(lambda x: x.double()), r"output\['made'\]", "dtype .*float32 +float64"),
        (wrong(lambda x: x[:1]), r"output\['made'\]", "shape"),
        (wrong(lambda x: x.contiguous(), 1), r"output\['turned'\]", "stride"),
        (wrong(_WrongGradient.apply), "gradient of linear.weight", "value"),
    ],
    ids=["value", "nan", "dtype", "shape", "stride", "gradient"],
)
def test_a_fault_is_named(backend: Callable[..., Any], what: str, kind: str) -> None:
    with pytest.raises(AssertionError, match=rf"float32, inputs 0, with\w* gradients +{what} +{kind}"):
        check_model(Model(), inputs()[:1], backend=backend, dtypes=(torch.float32,))


def forgetful(module: torch.fx.GraphModule, _: Any) -> Any:
    """A backend whose graphs write to copies of what they are given."""
    return lambda *args: module(*(each.clone() if isinstance(each, torch.Tensor) else each for each in args))


def test_a_state_update_that_is_forgotten() -> None:
    with pytest.raises(AssertionError, match=r"state steps afterwards +value +1 at \[0\] +0"):
        check_model(Model(), inputs()[:1], backend=forgetful, dtypes=(torch.float32,), gradients=False)


def test_a_state_that_is_replaced() -> None:
    """Whoever holds the buffer, or its address, would not see the update."""

    class Counts(torch.nn.Module):
        steps: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1  # also sets the attribute, so that the new value arrives
            return x + 1

    check_model(Counts(), (torch.ones(2),), backend="aot_eager")
    with pytest.raises(AssertionError, match=r"memory of state steps +value +'same address' +'new address'"):
        check_model(Counts(), (torch.ones(2),), backend=forgetful)


def test_state_is_the_same_before_every_run() -> None:
    model = Model()
    check_model(model, inputs(), backend="aot_eager", dtypes=(torch.float32,))
    assert model.steps == 0
    assert model.linear.weight.grad is None


def test_an_argument_that_is_changed() -> None:
    def update(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.sum()

    given = torch.ones(3)
    check_model(update, given, backend="aot_eager")
    assert given.sum() == 3, "the caller's tensor is not touched"
    with pytest.raises(AssertionError, match=r"input afterwards +value +2 at \[0\] +1"):
        check_model(update, given, backend=forgetful)


def test_an_output_that_becomes_its_input() -> None:
    """Whoever writes to the output would change the input as well."""

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        return lambda x: (x,)

    with pytest.raises(AssertionError, match=r"memory of output +value +'not shared' +'input\[0\]'"):
        check_model(lambda x: x.clone(), (torch.ones(3),), backend=backend)


def test_a_buffer_that_is_called_output() -> None:
    """The memory of the output and of the buffer are compared, each by its own name."""

    class Named(torch.nn.Module):
        output: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("output", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        return lambda x: (x,)

    check_model(Named(), (torch.ones(3),), backend="aot_eager")
    with pytest.raises(AssertionError, match=r"memory of output +value +'not shared' +'input\[0\]'"):
        check_model(Named(), (torch.ones(3),), backend=backend)


def test_a_wrong_decomposition() -> None:
    def silu(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.7 * x)

    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        made = aot_autograd(
            fw_compiler=lambda graph, _: graph.forward, decompositions={torch.ops.aten.silu.default: silu}
        )
        return made(module, given)

    with pytest.raises(AssertionError, match=r"bfloat16, inputs 0, without gradients +output +value"):
        check_model(torch.nn.SiLU(), (torch.randn(64),), backend=backend, dtypes=(torch.bfloat16,))


def test_errors_are_measured_against_exact_values() -> None:
    """A sum in another order is as right as eager's; a sum that is off by more than eager is not."""
    given = (torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)) * 1000,)

    def backwards(module: torch.fx.GraphModule, _: Any) -> Any:
        return lambda x: module(x.flip(-1))

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(-1)[:, -1]

    check_model(total, given, backend=backwards, dtypes=(torch.float32,))
    with pytest.raises(AssertionError, match="value"):
        check_model(total, given, backend=wrong_by(1e-3), dtypes=(torch.float32,))


def wrong_by(share: float) -> Callable[..., Any]:
    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *args: [each * (1 + share) for each in module(*args)]

    return backend


def test_values_that_are_not_finite() -> None:
    check_model(lambda x: x / 0, torch.tensor([1.0, -1.0, 0.0]), backend="aot_eager")
    with pytest.raises(AssertionError, match=r"inf at \[0\] +-inf, off by .*not finite"):
        check_model(lambda x: x / 0, torch.ones(2), backend=wrong_by(-2.0))


def test_a_reference_that_computes_something_else_is_not_used() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 100 if x.dtype is torch.float64 else x * 1

    check_model(function, torch.ones(3), backend="aot_eager")
    with pytest.raises(AssertionError, match=r"off by 1\.0e-01"):
        check_model(function, torch.ones(3), backend=wrong_by(0.1), dtypes=(torch.float32,))


def test_a_gradient_that_is_zero_but_for_rounding() -> None:
    """The bias before a batch norm has no influence: what is left of its gradient is noise, in eager as well."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    def noisy(module: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *args: [each + 1e-7 * each.flip(0) for each in module(*args)]

    check_model(model, (torch.randn(8, 4),), backend=noisy, dtypes=(torch.float32,))


def test_dropout_draws_the_same_numbers() -> None:
    check_model(torch.nn.Dropout(0.5), (torch.ones(64),), dtypes=(torch.float32,))


def test_a_tolerance_can_be_given() -> None:
    given = (torch.ones(3),)
    with pytest.raises(AssertionError, match=r"off by 1.0e-02, allowed 1.0e-05"):
        check_model(lambda x: x * 1, given, backend=wrong_by(0.01), dtypes=(torch.float32,))
    check_model(
        lambda x: x * 1, given, backend=wrong_by(0.01), dtypes=(torch.float32,), tolerance={torch.float32: 0.02}
    )
    check_model(lambda x: x * 1, given, backend=wrong_by(1e-6), dtypes=(torch.float32,))
    with pytest.raises(AssertionError, match=r"off by 9.5e-07, allowed 0.0e\+00"):
        check_model(lambda x: x * 1, given, backend=wrong_by(1e-6), tolerance={torch.float32: 0})


def test_strides_can_be_left_out() -> None:
    """A concatenation with nothing: Inductor takes it away, and the layout is that of what is left."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.new_empty(0), (x + 1).t()])

    given = (torch.randn(3, 4),)
    with pytest.raises(AssertionError, match=r"output +stride +\(3, 1\) +\(1, 4\)"):
        check_model(function, given, dtypes=(torch.float32,))
    check_model(function, given, dtypes=(torch.float32,), strides=False)


def test_inputs_by_name_and_values_that_are_no_tensors() -> None:
    def function(x: torch.Tensor, *, twice: bool) -> tuple[torch.Tensor, int, None]:
        return (x * 2 if twice else x + 0), x.shape[0], None

    check_model(function, [{"x": torch.ones(3), "twice": True}, {"x": torch.ones(4), "twice": False}], backend="eager")


class Pair:
    """An object that torch cannot look into, as a cache may be."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right


def test_objects_are_compared_by_their_attributes() -> None:
    def function(x: torch.Tensor) -> dict[str, Pair]:
        return {"pair": Pair(x + 1, x.view(3, 1).expand(3, 2) * 1)}

    check_model(function, torch.ones(3), backend="eager")
    with pytest.raises(AssertionError, match=r"output\['pair'\].right +value"):
        check_model(function, torch.ones(3), backend=wrong(lambda x: x * 2))


def test_a_stock_model() -> None:
    model = random_model(LLAMA)
    lengths: list[Inputs] = [{"input_ids": torch.arange(2 * length).reshape(2, length)} for length in (7, 10)]
    made = check_model(model, lengths, backend="inlay", dtypes=(torch.float32,))
    assert made.values > 2 * 2 * 2, "the caches of two layers are among the outputs"


def test_an_error_says_in_which_run() -> None:
    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        raise NotImplementedError("no such operator")

    with pytest.raises(Exception, match="no such operator") as caught:
        check_model(Model(), inputs()[:1], backend=backend)
    assert caught.value.__notes__[-1] == (
        "check_model was running the compiled model: float32, inputs 0, without gradients."
    )


def test_nothing_compiled_is_nothing_checked() -> None:
    with torch.compiler.set_stance("force_eager"), pytest.raises(AssertionError, match="Nothing was compiled"):
        check_model(Model(), inputs()[:1])
    sizes: list[Inputs] = [(torch.ones(size),) for size in range(1, 14)]
    with pytest.raises(AssertionError, match="recompile limit was reached, so that the last input sets ran eagerly"):
        check_model(lambda x: x + 1, sizes, backend="eager", dynamic=False, dtypes=(None,))


def test_a_compiled_model_is_not_compared_with_itself() -> None:
    with pytest.raises(UsageError, match=r"already compiled\. Give the model itself"):
        check_model(torch.compile(Model(), backend=wrong(lambda x: x * 2)), inputs()[:1])


@pytest.mark.filterwarnings("ignore:check_model skips")
def test_devices_times_dtypes() -> None:
    """`cpu:0` is the same processor under another name: each device runs every dtype."""
    once = check_model(Model(), inputs()[:1], backend="aot_eager")
    both = check_model(Model(), inputs()[:1], backend="aot_eager", devices=("cpu", "cpu:0", absent_device()))
    assert (both.runs, both.values, both.frames) == (2 * once.runs, 2 * once.values, 2 * once.frames)
    assert once.skipped == ()
    (skipped,) = both.skipped
    assert skipped.startswith(f"{absent_device()}: ")
    assert len(skipped) > 20, "the reason, in torch's words"


def absent_device() -> str:
    return "cuda:99" if torch.cuda.is_available() else "cuda"


def test_a_skipped_device_is_not_silent() -> None:
    with pytest.warns(UserWarning, match=rf"check_model skips the device {absent_device()}: "):
        check_model(Model(), inputs()[:1], backend="eager", dtypes=(None,), devices=("cpu", absent_device()))
    with (
        pytest.warns(UserWarning, match="check_model skips"),
        pytest.raises(AssertionError, match=rf"nothing was checked\. {absent_device()}: "),
    ):
        check_model(Model(), inputs()[:1], backend="eager", devices=(absent_device(),))


def test_a_fault_on_any_device_is_found() -> None:
    with pytest.raises(AssertionError, match="differs from eager in 2 places"):
        check_model(lambda x: x + 1, torch.ones(3), backend=wrong_by(0.1), dtypes=(None,), devices=("cpu", "cpu:0"))


@pytest.mark.parametrize(
    ("device", "sentence"),
    [("gpu0", "'gpu0' is not a device of torch. Give cpu, cuda"), ("meta", "have no values to compare")],
)
def test_devices_that_cannot_be_checked(device: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        check_model(Model(), inputs()[:1], devices=("cpu", device))


def test_no_dtype_is_no_check() -> None:
    with pytest.raises(UsageError, match=r"There are no dtypes\. Give at least one"):
        check_model(Model(), inputs()[:1], backend=wrong_by(0.1), dtypes=())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_model_and_inputs_are_moved() -> None:
    seen: list[str] = []

    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        seen.extend(each.device.type for each in given if isinstance(each, torch.Tensor))
        return module.forward

    model = Model()
    check_model(model, inputs()[:1], backend=backend, dtypes=(None,), devices=("cuda", "cpu"))
    assert set(seen) == {"cuda", "cpu"}
    assert model.linear.weight.device.type == "cpu"
