import pytest

from pallas.dispatch import require_gpu, select


def refuse(reason):
    def backend():
        raise NotImplementedError(reason)

    return backend


def test_the_first_that_serves_runs():
    assert select(None, xla=lambda: "portable", mosaic=refuse("no GPU"))() == "portable"
    assert select(None, xla=lambda: "portable", mosaic=lambda: "fast")() == "fast"


def test_a_named_backend_never_falls_back():
    with pytest.raises(NotImplementedError, match="no GPU"):
        select("mosaic", xla=lambda: "portable", mosaic=refuse("no GPU"))()


def test_an_unknown_backend_is_named():
    with pytest.raises(NotImplementedError, match=r"'triton' does not exist here; there is: mosaic, xla"):
        select("triton", xla=lambda: 1, mosaic=lambda: 1)


def test_all_refusals_are_reported():
    with pytest.raises(ExceptionGroup) as caught:
        select(None, xla=refuse("too wide"), mosaic=refuse("no GPU"))()
    assert [str(error) for error in caught.value.exceptions] == ["no GPU", "too wide"]


def test_require_gpu_on_a_cpu():
    with pytest.raises(NotImplementedError, match=r"kernel runs on GPUs, the default backend is 'cpu'"):
        require_gpu("kernel")
