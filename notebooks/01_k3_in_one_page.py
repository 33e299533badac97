# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # K3 in one page
#
# Kimi K3's text model written out in NumPy, one cell per equation, and run on **nano**: the small K3 that ships with
# this package and writes Python. Nano has every part of K3 (KDA, gated MLA, Block AttnRes, Stable LatentMoE with MXFP4
# experts) at a size that a laptop runs. Section numbers are those of the Kimi K3 technical report.
#
# The cells below share no code with `k3jax`: they take its weights, and section 6 compares the results.

# %%
import functools
import json
import lzma
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import k3jax

einsum = functools.partial(np.einsum, optimize=True)  # by matrix products where it can
model = k3jax.load(dtype=jnp.float32)  # float32 computes at full precision; the default is bfloat16
config, kda_config, mla_config, moe_config = model.config, model.config.kda, model.config.mla, model.config.moe
print(f"{config.num_layers} layers, {config.hidden_size} wide, {config.vocab_size} tokens; MLA in {config.mla_layers}")
experts, chosen = moe_config.num_experts, moe_config.num_experts_per_token
print(f"{experts} experts, {chosen} per token, from layer {config.first_moe_layer} on")

# %% [markdown]
# ## 1. The tree
#
# A model holds a static graph and a flat tuple of arrays (`model.graph`, `model.leaves`); merged, they are an NNX
# module with one array per parameter. Weights are `[out, in]` as released. Tensors that are always read together are
# one array: `qkvz` is q, k, v and the output gate of each head; `gate_up` is both halves of a gated MLP. Layers with
# the same shapes share a line.

# %%
tree = nnx.to_pure_dict(nnx.state(model.graph.merge(model.leaves)))
shapes = {}
for path, array in jax.tree.leaves_with_path(tree):
    keys = [str(entry.key) for entry in path]
    layer = int(keys.pop(1)) if keys[0] == "layers" else None
    shapes.setdefault((".".join(keys), array.shape, array.dtype.name), []).append(layer)
for (name, shape, dtype), layers in sorted(shapes.items(), key=lambda item: (item[1][0] is not None, item[0])):
    count = "" if layers == [None] else f"{len(layers):3} x"
    print(f"{count:6}{name:38}{shape!s:20}{dtype}")

# %% [markdown]
# ## 2. Attention residuals (report 2.2)
#
# The residual stream is not one sum. Every 4th layer of nano (12th of K3) freezes the running prefix $p$ as a source
# and starts a new sum; the first source is the embedding. Each sublayer reads a mix of all sources $v_i$ ($p$ last)
# by a learned pseudo-query $w$:
#
# $$\alpha = \mathrm{softmax}_i \, \langle w,\ \mathrm{RMSNorm}(v_i) \rangle, \qquad h = \sum_i \alpha_i v_i$$
#
# Keys are normalised, values are raw, and no score is divided by $\sqrt{d}$.


# %%
def rms_norm(x, weight, eps=1e-5):
    return weight * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def softmax(x, axis):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def attn_res(sources, prefix, w):
    values = np.stack([*sources, prefix])  # [source, token, channel]
    alpha = softmax(rms_norm(values, w["norm"]) @ w["query"], axis=0)
    return einsum("st,std->td", alpha, values), alpha


# %% [markdown]
# ## 3. Kimi Delta Attention (report 2.1.1)
#
# Three layers of four. A head's whole past is one matrix $S$ (keys by values). Per token: decay each key channel,
# predict the value of this key, write the error, read:
#
# $$S \leftarrow \mathrm{Diag}(e^{g_t})\,S, \quad u = \beta_t\,(v_t - S^\top k_t), \quad
# S \leftarrow S + k_t u^\top, \quad o_t = S^\top q_t / \sqrt{d}$$
#
# $q, k, v$ come out of a causal convolution of width 4 and SiLU, $q$ and $k$ then have length 1. The log decay
# $g = -5\,\sigma(e^{A}(f + \mathrm{dt}))$ lies in $(-5, 0)$; $\beta = \sigma(b)$. Each head's $o$ is normalised and
# gated by $\sigma(z)$.


# %%
def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def unit(x):
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def kda(x, w):
    heads, dim = kda_config.num_heads, kda_config.head_dim
    qkvz = einsum("td,hicd->thic", x, w["qkvz"])
    rows = np.concatenate([np.zeros((3, heads, 3, dim)), qkvz[:, :, :3]])
    mixed = sum(w["conv"][tap] * rows[tap : tap + len(x)] for tap in range(4))
    q, k, v = np.moveaxis(mixed * sigmoid(mixed), 2, 0)
    q, k, z = unit(q) / np.sqrt(dim), unit(k), qkvz[:, :, 3]
    f = einsum("ta,hca->thc", x @ w["f_a"].T, w["f_b"])
    g = -5 * sigmoid(np.exp(w["a_log"])[:, None] * (f + w["dt_bias"]))
    beta = sigmoid(x @ w["beta"].T)[..., None]
    state, out, norms = np.zeros((heads, dim, dim)), [], []
    for t in range(len(x)):
        state = np.exp(g[t])[..., None] * state
        u = beta[t] * (v[t] - (k[t][:, None] @ state)[:, 0])
        state = state + k[t][..., None] * u[:, None, :]
        out.append((q[t][:, None] @ state)[:, 0])
        norms.append(np.linalg.norm(state, axis=(1, 2)))
    gated = rms_norm(np.stack(out), w["norm"]) * sigmoid(z)
    return einsum("thc,dhc->td", gated, w["out"]), state, np.stack(norms)


# %% [markdown]
# ## 4. Gated MLA without positions (report 2.1.2)
#
# Every fourth layer and the last. Keys and values of all heads are made from one latent $c_s$ per token, beside a key
# part $k^{pe}_s$ that all heads share. No rotation anywhere: KDA knows about order. The cache holds $[c_s, k^{pe}_s]$.
#
# $$o_{t,h} = \sum_{s \le t} \mathrm{softmax}_s\!\left(\frac{q_{t,h} \cdot [W^K_h c_s,\ k^{pe}_s]}{\sqrt{d_q}}\right)
# W^V_h c_s, \qquad y_t = W^O\,(o_t \odot \sigma(W^G x_t))$$


# %%
def mla(x, w):
    q_rank, kv_rank = mla_config.q_lora_rank, mla_config.kv_lora_rank
    down = x @ w["in_proj"].T
    query = einsum("tr,hqr->htq", rms_norm(down[:, :q_rank], w["q_norm"]["weight"], 1e-6), w["q_up"])
    c = rms_norm(down[:, q_rank : q_rank + kv_rank], w["kv_norm"]["weight"], 1e-6)
    shared = down[:, q_rank + kv_rank :]
    key = einsum("tl,hkl->htk", c, w["key_up"])
    key = np.concatenate([key, np.broadcast_to(shared, (len(key), *shared.shape))], axis=-1)
    value = einsum("tl,hvl->htv", c, w["value_up"])
    scores = query @ key.swapaxes(1, 2) / np.sqrt(query.shape[-1])
    causal = np.tril(np.ones((len(x), len(x)), bool))
    read = softmax(np.where(causal, scores, -np.inf), axis=-1) @ value
    gated = read * sigmoid(einsum("td,hvd->htv", x, w["gate"]))
    return einsum("htv,dhv->td", gated, w["out"]), np.concatenate([c, shared], axis=-1)


# %% [markdown]
# ## 5. Stable LatentMoE (report 2.3)
#
# The router scores $s = \sigma(W x)$ at full width. The bias $b$ helps to **choose** the experts $T$ = top-k of
# $s + b$; their **weights** come from $s$ alone. Experts work in a narrower latent space, their weighted sum is
# normalised there, and the shared experts join at full width:
#
# $$y = W^{up}\,\mathrm{RMSNorm}\Big(\sum_{j \in T} \frac{s_j}{\sum_T s}\,E_j(W^{down} x)\Big) + E_{shared}(x)$$
#
# Every MLP uses SiTU, a GLU whose halves are both capped: $4\tanh(a/4)\,\sigma(a) \cdot 25\tanh(b/25)$. Expert weights
# are MXFP4: two 4-bit codes in a byte, lower nibble first, and one power of two per 32 inputs.


# %%
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])


def mxfp4(packed, scale):
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return VALUES[codes] * np.repeat(2.0 ** (scale.astype(int) - 127), 32, axis=-1)


def unpack(packed):
    gate_up = mxfp4(packed["gate_up_packed"], packed["gate_up_scale"])
    return list(zip(gate_up, mxfp4(packed["down_packed"], packed["down_scale"])))


def mlp(x, gate_up, down):
    a, b = x @ gate_up[0].T, x @ gate_up[1].T
    return (4 * np.tanh(a / 4) * sigmoid(a) * 25 * np.tanh(b / 25)) @ down.T


def top_k(scores):
    return np.argsort(-scores, axis=-1, kind="stable")[:, : moe_config.num_experts_per_token]


def moe(x, w):
    scores = sigmoid(x @ w["router"].T)
    chosen = top_k(scores + w["correction_bias"])
    weights = np.take_along_axis(scores, chosen, axis=-1)
    weights = weights / weights.sum(axis=-1, keepdims=True) * moe_config.routed_scaling_factor
    latent = x @ w["latent_down"].T
    mixed = np.zeros_like(latent)
    for expert in range(moe_config.num_experts):
        token, rank = np.nonzero(chosen == expert)
        mixed[token] += weights[token, rank, None] * mlp(latent[token], *w["experts"][expert])
    routed = rms_norm(mixed, w["latent_norm"]["weight"]) @ w["latent_up"].T
    return routed + mlp(x, **w["shared"]), (scores, chosen, weights)


# %% [markdown]
# ## 6. The whole forward pass, and what the model says
#
# A layer reads the stream, freezes it when it starts a block (after the read, so that the first read of a block still
# sees the old prefix), adds attention, reads again, adds the MLP. The loop below is all of K3's text model, in
# float64. `model.states` runs the real one and returns what it keeps.


# %%
def widen(array):
    array = np.asarray(array)
    return array if array.dtype == np.uint8 else array.astype(np.float64)


weights = jax.tree.map(widen, tree)
for layer in config.moe_layers:
    weights["layers"][layer]["ffn"]["experts"] = unpack(weights["layers"][layer]["ffn"]["experts"])


def forward(ids):
    seen = {"prefix": [], "alpha": {}, "state": {}, "norms": {}, "latent": {}, "routing": []}
    sources, prefix = [], weights["embedding"][ids]
    for layer in range(config.num_layers):
        w = weights["layers"][layer]
        h = prefix
        if sources:
            h, seen["alpha"][f"{layer} attention"] = attn_res(sources, prefix, w["attention_res"])
        if layer % config.attn_res_block_size == 0:
            sources, prefix = [*sources, prefix], 0
        x = rms_norm(h, w["attention_norm"]["weight"])
        if layer in config.mla_layers:
            attended, seen["latent"][layer] = mla(x, w["attention"])
        else:
            attended, seen["state"][layer], seen["norms"][layer] = kda(x, w["attention"])
        prefix = prefix + attended
        h, seen["alpha"][f"{layer} MLP"] = attn_res(sources, prefix, w["ffn_res"])
        x = rms_norm(h, w["ffn_norm"]["weight"])
        if layer < config.first_moe_layer:
            fed = mlp(x, **w["ffn"])
        else:
            fed, routing = moe(x, w["ffn"])
            seen["routing"].append(routing)
        prefix = prefix + fed
        seen["prefix"].append(prefix)
    h, seen["alpha"]["output"] = attn_res(sources, prefix, weights["output_res"])
    return rms_norm(h, weights["norm"]["weight"]) @ weights["head"].T, seen


text = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci("
ids = model.tokenizer.encode(text)
logits, by_hand = forward(ids)
states = model.states(ids)


def compare(name, ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape, name
    error = np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(ours**2))
    print(f"{name:42}{ours.shape!s:18}relative RMS {error:.0e}")
    assert error < 1e-4, name  # also false for NaN


def in_order(by_layer):
    return [array for _, array in sorted(by_layer.items())]


scores, chosen, expert_weights = (np.stack(part) for part in zip(*by_hand["routing"]))
compare("2.2    prefix after each layer", by_hand["prefix"], states.layer_prefix)
compare("2.1.1  KDA state after the text", in_order(by_hand["state"]), in_order(states.kda_state))
compare("2.1.2  MLA rows in the cache", in_order(by_hand["latent"]), in_order(states.latent))
compare("2.3    weights of the chosen experts", expert_weights, states.router_weights)
compare("       logits", logits, states.logits)
assert (chosen == states.router_ids).all()
print(f"the same experts in all {chosen[..., 0].size} decisions; most likely next: ", end="")
print(*(repr(model.tokenizer.decode([token])) for token in np.argsort(-logits[-1])[:4]))

# %% [markdown]
# ## 7. A KDA state over a text
#
# The text from here on is held out: files of the standard library that the list in nano's directory marks as
# validation, read from the Python that runs this notebook (320 tokens of each). Below, the Frobenius norm of each
# head's state while nano reads one of them. MLA's cache grows by a row per token; a KDA state keeps its size, and
# decay and the delta rule (a key that is written again replaces its value) hold its norm back: it rises steeply at
# first and then flattens. A head whose norm jumps forgets and rewrites.

# %%
with lzma.open(model.path / "training_files.tsv.xz", "rt", encoding="utf-8") as listed:
    rows = [line.rstrip("\n").split("\t") for line in listed]
held_out = [row[3] for row in rows if (row[0], row[2]) == ("python", "validation")]
found = [path for path in (Path(sysconfig.get_path("stdlib"), name) for name in held_out) if path.is_file()]
documents = {path.name: model.tokenizer.encode(path.read_text(encoding="utf-8"))[:320] for path in found}
passes = {name: forward(document)[1] for name, document in documents.items()}
print(f"{len(documents)} files, {sum(map(len, documents.values()))} tokens")

longest = max(documents, key=lambda name: len(documents[name]))
shown = (config.kda_layers[0], config.kda_layers[4], config.kda_layers[-1])
figure, axes = plt.subplots(1, len(shown), figsize=(10, 2.8), layout="constrained", sharex=True)
for axis, layer in zip(axes, shown):
    axis.plot(passes[longest]["norms"][layer], linewidth=1)
    axis.set(title=f"layer {layer}", xlabel="token", ylim=(0, None))
axes[0].set_ylabel("norm of the state, per head")
figure.suptitle(f"KDA states over {longest}")
plt.show()

# %% [markdown]
# ## 8. Depth attention
#
# The weights $\alpha$ of section 2 for the short text. Left: every read of the stream, from the first MLP to the
# output, averaged over tokens; a column sums to 1. New sources appear where blocks start. Right: the last read, token
# by token. Without AttnRes a read would take the plain sum.

# %%
sites, blocks = list(by_hand["alpha"]), config.num_attn_res_blocks
picture = np.full((blocks + 1, len(sites)), np.nan)
for column, alpha in enumerate(by_hand["alpha"].values()):
    picture[: len(alpha) - 1, column] = alpha[:-1].mean(axis=1)
    picture[-1, column] = alpha[-1].mean()
frozen_after = [block * config.attn_res_block_size - 1 for block in range(1, blocks)]
names = ["embedding", *(f"after layer {layer}" for layer in frozen_after), "prefix"]
tokens = [repr(model.tokenizer.decode([token]))[1:-1] for token in ids]

figure, axes = plt.subplots(1, 2, figsize=(12, 3.4), layout="constrained", sharey=True)
for axis, data, labels in zip(axes, (picture, by_hand["alpha"]["output"]), (sites, tokens)):
    image = axis.imshow(data, aspect="auto", vmin=0, vmax=1, cmap="viridis")
    axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
axes[0].set(yticks=range(blocks + 1), yticklabels=names, title="all reads (mean over tokens)")
axes[1].set(title="the output's read, per token")
figure.colorbar(image, ax=axes, label="weight")
plt.show()

# %% [markdown]
# ## 9. Expert load with and without Quantile Balancing (report 2.3.3)
#
# Token $i$ takes expert $j$ when $s_{ij} + b_j$ beats its cutoff, the (k+1)-th largest score $\alpha_i$. So
# $r_{ij} = \alpha_i - s_{ij}$ is the bias that expert $j$ would need, and the $k/n$ quantile of $r_{ij}$ over the
# tokens gives each of $n$ experts its fair share. Training sets $b$ to that after every step and removes the mean;
# at inference only the last $b$ is left.
#
# Three ways to choose by the same scores of the held-out text: **nano's bias**, as trained; **no bias**, $b = 0$;
# **balanced here**, ten steps of the rule on this very text. "No bias" says what the bias does in nano and no more: a
# model *trained* without balancing has other routers and experts. That one is the last picture: a second model that
# saw the same 3,107 batches with $b = 0$ throughout. `curves.json` beside nano's weights holds both runs' load during
# training, the mean over layers every twenty steps, and each layer's load on all held-out files at the end.


# %%
def quantile_balancing(scores, steps=10):
    experts, k = moe_config.num_experts, moe_config.num_experts_per_token
    bias = np.zeros(experts)
    for _ in range(steps):
        cutoff = np.sort(scores + bias, axis=-1)[:, -k - 1, None]
        bias = np.quantile(cutoff - scores, k / experts, axis=0)
        bias -= bias.mean()
    return bias


def load(scores, bias):
    """Tokens of each expert over the mean."""
    counts = np.bincount(top_k(scores + bias).ravel(), minlength=moe_config.num_experts)
    return counts / counts.mean()


layers, by_layer = config.moe_layers, zip(*(seen["routing"] for seen in passes.values()))
pooled = [np.concatenate([scores for scores, _, _ in routings]) for routings in by_layer]
trained = [weights["layers"][layer]["ffn"]["correction_bias"] for layer in layers]
loads = {
    "nano's bias": np.stack([load(scores, bias) for scores, bias in zip(pooled, trained)]),
    "no bias": np.stack([load(scores, 0) for scores in pooled]),
    "balanced here": np.stack([load(scores, quantile_balancing(scores)) for scores in pooled]),
}

middle = len(layers) // 2
figure, axes = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
for label, values in loads.items():
    busiest = values.max(axis=1)
    axes[0].plot(np.sort(values[middle])[::-1], label=label, drawstyle="steps-mid")
    axes[1].plot(layers, busiest, "o-", markersize=3, label=label)
    print(f"{label:14} busiest expert / mean: median layer {np.median(busiest):.2f}, worst {busiest.max():.2f}")
axes[0].set(title=f"layer {layers[middle]}", xlabel="experts, busiest first", ylabel="load / mean", ylim=(0, None))
axes[1].set(title="busiest expert", xlabel="layer", ylabel="load / mean", ylim=(0, None))
axes[1].legend()
plt.show()

# %%
curves = json.loads((model.path / "curves.json").read_text())
held_out_load = curves.pop("held_out_load_max_over_mean")
figure, axes = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
for label, curve in curves.items():
    axes[0].plot(np.array(curve["tokens"]) / 1e6, curve["imbalance"], linewidth=0.8, label=label)
    axes[1].plot(layers, held_out_load[label], "o-", markersize=3, label=label)
    print(f"{label:23} worst layer on held-out files {max(held_out_load[label]):.2f}")
axes[0].set(title="while training", xlabel="million tokens", ylabel="busiest expert / mean", ylim=(0, None))
axes[1].set(title="all held-out files", xlabel="layer", ylim=(0, None))
axes[1].legend()
plt.show()
