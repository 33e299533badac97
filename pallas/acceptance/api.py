"""Public function of acceptance by kernels."""

from jaxtyping import Array, Float32, Int32

from pallas.acceptance import mosaic
from pallas.acceptance.types import Requests, Rule, Seen, Stands


def judge(
    rule: Rule,
    target: Float32[Array, "B W V"],
    draft: Float32[Array, "B G V"],
    token: Int32[Array, "B G"],
    requests: Requests,
    seen: Seen,
    streams: tuple[int, int],
) -> Stands:
    """Accepts drafts by `rule` and draws what follows them.

    `target` are the target's logits; `draft` those that the drafts were drawn from, at the request's temperature (any
    scale for greedy rows). `streams` number the noise of acceptance and of the token that follows.

    A Mosaic kernel, for up to 7 drafts. Raises `NotImplementedError` with the reason for what it does not serve.
    """
    mosaic.require_supported(target.shape, draft.shape)
    return mosaic.judge(rule, target, draft, token, requests, seen, streams)
