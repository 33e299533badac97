"""A model that is loaded and ready to run."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from k3jax import step
from k3jax.cache import K3Cache, KvCacheDtype, Rows, create, latent_dtype
from k3jax.config import K3Config
from k3jax.generation import buckets, prompt
from k3jax.model import K3
from k3jax.params import Tree
from k3jax.sharding import Layout
from k3jax.speculation.drafters import Draft
from k3jax.states import States
from k3jax.tokenizer import Tokenizer
from pallas.dispatch import Implementation


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """Weights on their devices, split once into a static graph and arrays, with the tokenizer beside them."""

    config: K3Config
    graph: step.Graph
    leaves: tuple[jax.Array, ...]
    dtype: Any
    tokenizer: Tokenizer | None
    max_length: int
    """Positions that a sequence may have, prompt and output together."""
    path: Path | None = None
    draft: Draft | None = None
    """Proposes tokens while decoding; None decodes token by token."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Of the latents in its caches."""

    @classmethod
    def of(
        cls,
        config: K3Config,
        parameters: Tree,
        *,
        tokenizer: Tokenizer | None = None,
        layout: Layout | None = None,
        implementation: Implementation = None,
        max_length: int | None = None,
        path: Path | None = None,
        kv_cache_dtype: KvCacheDtype = "auto",
    ) -> "Model":
        """A model of `parameters` (a tree as `params.model_specs` declares it), whose embedding gives the dtype.

        Raises `LengthError` for a `max_length` outside 1 .. `max_position_embeddings` and ValueError for a tokenizer
        with more ids than the embedding has rows, or an unknown `kv_cache_dtype`.
        """
        latent_dtype(kv_cache_dtype, None)
        longest = config.max_position_embeddings
        if max_length is not None and not 1 <= max_length <= longest:
            raise prompt.LengthError(f"max_length is {max_length}, expected 1 to {longest} (max_position_embeddings)")
        if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} ids, the embedding {config.vocab_size} rows; "
                "is it another model's tokenizer?"
            )
        graph, leaves = step.split(K3(config, parameters, implementation, layout), layout)
        return cls(
            config=config,
            graph=graph,
            leaves=leaves,
            dtype=parameters["embedding"].dtype,
            tokenizer=tokenizer,
            max_length=max_length or longest,
            path=path,
            kv_cache_dtype=kv_cache_dtype,
        )

    @property
    def latent_dtype(self) -> Any:
        """Of cached latents."""
        return latent_dtype(self.kv_cache_dtype, self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, the draft's own included."""
        own = () if self.draft is None else self.draft.leaves
        return sum(leaf.nbytes for leaf in (*self.leaves, *own))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an output: the configured end of a message, and `[EOS]`, the end of a document."""
        end_of_document = self.config.bos_token_id + 1
        known = (self.config.eos_token_id, end_of_document, *(self.tokenizer.eos_ids if self.tokenizer else ()))
        return tuple(dict.fromkeys(token for token in known if token < self.config.vocab_size))

    def new_cache(self, slots: int, pages: int, page_size: int = buckets.PAGE_SIZE) -> K3Cache:
        """A zeroed cache where the model lives; the dummy slot and page are added."""
        sizes = {"slots": slots + 1, "pages": pages + 1, "page_size": page_size}
        sizes |= {"dtype": self.dtype, "kv_cache_dtype": self.kv_cache_dtype}
        layout = self.graph.layout
        if layout is None:
            return create(self.config, **sizes)
        shapes = jax.eval_shape(lambda: create(self.config, **sizes))
        return jax.tree.map(lambda a, place: jnp.zeros(a.shape, a.dtype, device=place), shapes, layout.cache(shapes))

    def place(self, tree: Any) -> Any:
        """Small arrays, whole on every device of the mesh (or uncommitted without one)."""
        layout = self.graph.layout
        return jax.tree.map(jnp.asarray, tree) if layout is None else jax.device_put(tree, layout.replicated)

    def logits(self, ids: prompt.Prompt) -> Float[np.ndarray, "T V"]:
        """float32 logits after every token of `ids` (text is encoded first).

        Raises `PromptError` for an empty or overlong prompt and for ids out of range.
        """
        tokens = self.read(ids)
        width = buckets.power_of_two(len(tokens), buckets.CHUNKS[0])
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(tokens)] = tokens
        rows = Rows(*(np.asarray(value, np.int32) for value in ([0], [[0]], [0], [len(tokens)])))
        return np.asarray(step.forward(self.graph, self.leaves, *self.place((rows, padded))).logits)[0, : len(tokens)]

    def states(self, ids: prompt.Prompt, decode_ids: prompt.Prompt = ()) -> States:
        """Everything the model keeps and computes for `ids`; `decode_ids` are then fed one at a time.

        Raises `PromptError` as `logits` does.
        """
        from k3jax.verification.observe import observe  # it builds on this class

        tokens = self.read(ids)
        more = prompt.read(decode_ids, self.tokenizer, self.config.vocab_size, "decode_ids") if len(decode_ids) else []
        prompt.require_room(tokens, self.max_length, tokens=len(more))
        return observe(self, tokens, more)

    def read(self, ids: prompt.Prompt, name: str = "prompt") -> list[int]:
        """Checked token ids of a prompt that fits."""
        tokens = prompt.read(ids, self.tokenizer, self.config.vocab_size, name)
        prompt.require_room(tokens, self.max_length, name)
        return tokens
