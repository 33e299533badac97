"""A DSpark draft written again in NumPy, float64, from its public tensors and the paper alone, without k3jax.

GQA attention, no rotary scaling, any Markov head, own embedding and head, full or reduced vocabulary.
"""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def norm(x, weight, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def rotate(x, position, theta):
    """Half-split rotation of [tokens, heads, dim]."""
    half = x.shape[-1] // 2
    angle = position[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


class PlainDraft:
    """Steps over a growing context, greedily."""

    def __init__(self, config, tensors):
        self.config, self.tensors = config, {name: np.asarray(t, np.float64) for name, t in tensors.items()}
        self.features = np.zeros((0, self.tensors["fc.weight"].shape[1]))

    def heads(self, name, x, position=None):
        y = (x @ self.tensors[f"{name}_proj.weight"].T).reshape(len(x), -1, self.config["head_dim"])
        if position is None:
            return y
        return rotate(
            norm(y, self.tensors[f"{name}_norm.weight"], self.config["rms_norm_eps"]),
            position,
            self.config["rope_theta"],
        )

    def attention(self, name, x, position, context, before):
        keys = np.concatenate([self.heads(f"{name}.k", context, before), self.heads(f"{name}.k", x, position)])
        values = np.concatenate([self.heads(f"{name}.v", context), self.heads(f"{name}.v", x)])
        queries = self.heads(f"{name}.q", x, position)
        out = np.zeros_like(queries)
        share = queries.shape[1] // keys.shape[1]
        for head in range(queries.shape[1]):
            scores = queries[:, head] @ keys[:, head // share].T / np.sqrt(queries.shape[-1])
            if self.config["is_causal"]:
                scores = np.where(np.concatenate([before, position])[None] > position[:, None], -np.inf, scores)
            out[:, head] = softmax(scores) @ values[:, head // share]
        return out.reshape(len(x), -1) @ self.tensors[f"{name}.o_proj.weight"].T

    def hidden(self, anchor):
        eps, weights = self.config["rms_norm_eps"], self.tensors
        context = norm(self.features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
        ids = [anchor] + [self.config["mask_token_id"]] * (self.config["block_size"] - 1)
        before = np.arange(len(context))
        x, position = weights["embed_tokens.weight"][ids], len(context) + np.arange(len(ids))
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            y = norm(x, weights[f"{name}.input_layernorm.weight"], eps)
            x = x + self.attention(f"{name}.self_attn", y, position, context, before)
            y = norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
            gate, up = (y @ weights[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (gate * sigmoid(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
        return norm(x, weights["norm.weight"], eps)

    def signal(self, hidden, embedding, state):
        """What W2 reads, and the recurrent state."""
        weights = self.tensors
        if self.config["markov_head_type"] == "gated":
            both = np.concatenate([hidden, embedding])
            gate = sigmoid(weights["markov_head.gate_proj.weight"] @ both + weights["markov_head.gate_proj.bias"])
            return gate * embedding, state
        if self.config["markov_head_type"] == "rnn":
            three = np.concatenate([state, embedding, hidden])
            joint = weights["markov_head.joint_proj.weight"] @ three + weights["markov_head.joint_proj.bias"]
            forget, candidate, output = np.split(joint, 3)
            state = sigmoid(forget) * state + (1 - sigmoid(forget)) * np.tanh(candidate)
            return np.tanh(output), state
        return embedding, state

    def step(self, features, anchor):
        """The quantities of one step of a golden file."""
        self.features = np.concatenate([self.features, features])
        weights, hidden, previous = self.tensors, self.hidden(anchor), anchor
        base = hidden @ weights["lm_head.weight"].T
        state = np.zeros(weights["markov_head.markov_w1.weight"].shape[1])
        tokens, logits, confidence = [], [], []
        for k, row in enumerate(hidden):
            embedding = weights["markov_head.markov_w1.weight"][previous]
            signal, state = self.signal(row, embedding, state)
            logits.append(base[k] + weights["markov_head.markov_w2.weight"] @ signal)
            both = np.concatenate([row, embedding])
            confidence.append(
                (weights["confidence_head.proj.weight"] @ both + weights["confidence_head.proj.bias"]).item()
            )
            own = int(np.argmax(logits[-1]))
            previous = own + int(weights["d2t"][own]) if "d2t" in weights else own
            tokens.append(previous)
        return {
            "target_features": features,
            "anchor": np.asarray(anchor),
            "base_logits": base,
            "logits": np.stack(logits),
            "tokens": np.asarray(tokens),
            "confidence_logits": np.asarray(confidence),
        }


def shapes(config, features):
    """Every tensor of a draft's file."""
    width, inner, rank, dim = (
        config["hidden_size"],
        config["intermediate_size"],
        config["markov_rank"],
        config["head_dim"],
    )
    vocab, own = config["vocab_size"], config["draft_vocab_size"]
    named = {
        "fc.weight": (width, features),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
        "embed_tokens.weight": (vocab, width),
        "lm_head.weight": (own, width),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (own, rank),
        "confidence_head.proj.weight": (1, width + rank),
        "confidence_head.proj.bias": (1,),
    }
    named |= {
        "gated": {"markov_head.gate_proj.weight": (rank, width + rank), "markov_head.gate_proj.bias": (rank,)},
        "rnn": {
            "markov_head.joint_proj.weight": (3 * rank, 2 * rank + width),
            "markov_head.joint_proj.bias": (3 * rank,),
        },
        "vanilla": {},
    }[config["markov_head_type"]]
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}"
        queries, keys = (config[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
        named |= {f"{name}.{part}_layernorm.weight": (width,) for part in ("input", "post_attention")}
        named |= {f"{name}.self_attn.{part}_norm.weight": (dim,) for part in "qk"}
        named |= {f"{name}.self_attn.{part}_proj.weight": (keys, width) for part in "kv"}
        named[f"{name}.self_attn.q_proj.weight"] = (queries, width)
        named[f"{name}.self_attn.o_proj.weight"] = (width, queries)
        named |= {f"{name}.mlp.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
        named[f"{name}.mlp.down_proj.weight"] = (width, inner)
    return named
