import inspect

import pytest

from pallas.dispatch import WrongDevice, require_gpu, select


def refuse(reason):
    def backend():
        raise NotImplementedError(reason)

    return backend


def test_the_first_that_serves_runs():
    assert select(None, xla=lambda: "portable", mosaic=refuse("no GPU"))() == "portable"
    assert select(None, xla=lambda: "portable", mosaic=lambda: "fast")() == "fast"


def on_a_cpu():
    require_gpu("kernel")


def test_a_named_backend_is_not_replaced_on_a_wrong_device():
    with pytest.raises(WrongDevice, match="the default backend is 'cpu'"):
        select("mosaic", xla=lambda: "portable", mosaic=on_a_cpu)()


def test_a_named_backend_that_refuses_the_shape_is_replaced_with_a_note(caplog):
    assert select("mosaic", xla=portable, mosaic=refuse("serves 128 channels, got 64"))() == "portable"
    assert "serves 128 channels, got 64" in caplog.text


def test_a_named_backend_without_another_refuses():
    with pytest.raises(NotImplementedError, match="too wide"):
        select("mosaic", mosaic=refuse("too wide"))()


def portable():
    return "portable"


def test_an_op_without_the_named_kernel_says_so_and_runs(caplog):
    assert select("triton", mosaic=refuse("no GPU"), xla=portable)() == "portable"
    assert "no triton kernel" in caplog.text
    assert f"{__name__}.portable" in caplog.text


def test_a_served_name_leaves_no_note(caplog):
    assert select("xla", xla=portable)() == "portable"
    assert select(None, xla=portable)() == "portable"
    assert not caplog.records


def test_an_unknown_name_is_refused():
    unchecked = inspect.unwrap(select)  # the tests' type checks would refuse it first
    with pytest.raises(ValueError, match=r"'cuda' is unknown; choose one of mosaic, triton, xla"):
        unchecked("cuda", xla=portable)


def test_all_refusals_are_reported():
    with pytest.raises(ExceptionGroup) as caught:
        select(None, xla=refuse("too wide"), mosaic=refuse("no GPU"))()
    assert [str(error) for error in caught.value.exceptions] == ["no GPU", "too wide"]


def test_require_gpu_on_a_cpu():
    with pytest.raises(NotImplementedError, match=r"kernel runs on GPUs, the default backend is 'cpu'"):
        require_gpu("kernel")
