"""The host's side of `ruled_step`: between draft and verdict it follows the grammars along the drafts."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from k3jax.logit_rules import mask_words
from k3jax.runtime import Model
from k3jax.speculation.drafters import Draft, DSparkDrafter
from serving import ruled_step, upload
from serving.device import Decoded, DeviceState
from serving.plan import DecodeRow


class GrammarStep:
    """Steps with drafts for batches in which a grammar rules."""

    def __init__(self, model: Model, draft: Draft, rows: int, block: int, group: int, top: int) -> None:
        """`rows` of a batch, `block` drafts of a row, masks sent for `group` rows at a time, `top` alternatives."""
        self._model, self._draft, self._rows, self._block = model, draft, rows, block
        self._group, self._top = group, top
        self._words = mask_words(model.config.vocab_size)
        width = block + 1 if draft.widths is None else draft.widths.sizes[-1]
        empty = ruled_step.empty_masks(rows, width, self._words)
        self._masks: ruled_step.BlockMasks = model.place(jax.tree.map(np.asarray, empty))

    def run(self, state: DeviceState, packed: jax.Array, rows: Sequence[DecodeRow]) -> tuple[DeviceState, Decoded]:
        """Enqueues a step and waits for its drafts. `packed` as in `device.speculate`. Donates the state.

        Without rows, for warming up, it takes the way of a step with some.
        """
        model, draft = self._model, self._draft
        ruled = [row for row in rows if row.sequence.request.constraint is not None]
        forced = model.place(upload.forced(ruled, self._rows, self._block))
        args, options = (model.graph, model.leaves), {"drafter": draft.drafter}
        # The context of a draft is its pages, or the text that it searches.
        field, nothing = ("context", ()) if isinstance(draft.drafter, DSparkDrafter) else ("text", None)
        cache, context = state.cache, getattr(state, field)
        state = dataclasses.replace(state, cache=ruled_step.NO_CACHE, **{field: nothing})
        context, drafts = ruled_step.propose(
            *args, context, state, packed, draft.leaves, forced, **options, widths=draft.widths
        )
        drafts.token.copy_to_host_async()
        cache, seen = ruled_step.verify(*args, cache, state, packed, drafts.token, **options)
        # From here on the target is at work, and the grammars are followed meanwhile.
        token = np.asarray(drafts.token)
        for start in range(0, max(len(ruled), 1), self._group):
            masks = upload.block_masks(ruled[start : start + self._group], token, self._group, self._words)
            self._masks = ruled_step.set_block_masks(self._masks, model.place(masks))
        rest = (packed, draft.leaves, drafts, seen, self._masks)
        state = dataclasses.replace(state, **{field: context})
        return ruled_step.settle(model.graph, state, cache, *rest, **options, rule=draft.rule, top=self._top)
