"""Qwen3.5: three gated delta nets per layer of attention; qwen35 (dense) and qwen35moe (a mixture of experts).

Layer (llama.cpp, ``src/models/qwen35.cpp``, ``qwen35moe.cpp``)::

    a = rms_norm(x, attn_norm)
    recurrent:  u, z = a Wqkv, a Wgate;  alpha, beta = a Walpha, a Wbeta
                o = delta_net(u, alpha, beta)                       engine/cpu/delta_net.py
                y = x + (rms_norm(o, ssm_norm) * silu(z)) Wout      the norm over each head of values
    attention:  [q, g], k, v = a Wq, a Wk, a Wv                     per head, queries then gates
                q, k = rope(rms_norm(q)), rope(rms_norm(k))         per head, the first n_rot of d_k dimensions
                y = x + (attention(q, k, v) * sigmoid(g)) Wo
    x = y + swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(y, post_attention_norm); in qwen35moe, experts(b)
"""

from engine.arrays import Array, Matrix, Pass
from engine.models.delta_net import DeltaNet
from engine.models.feed_forward import feed_forward
from engine.models.hybrid import Attention, Hybrid, Layer, Recurrent
from engine.models.mtp import MTP
from engine.models.weights import stacked


class Qwen35(Hybrid):
    """qwen35 and qwen35moe, text only."""

    def load_rest(self) -> None:
        """Load the table of rotation angles and the layer that drafts."""
        c = self.config
        self.rotary = self._rotary(c.rope, self.cache.n_ctx)
        if c.n_mtp:
            self.mtp = MTP(self, self.load_layer(c.n_layer))

    def load_layer(self, il: int) -> Layer:
        """The weights of layer ``il``, of the trunk or of the layer after it, which drafts."""
        c, blk = self.config, f"blk.{il}."
        recurrent = il < c.n_layer and c.recurrent[il]
        return Layer(
            attn_norm=self._vector(blk + "attn_norm.weight", c.n_embd),
            mixer=self._recurrent(blk) if recurrent else self._attention(blk, il),
            post_attention_norm=self._vector(blk + "post_attention_norm.weight", c.n_embd),
            ffn=self._feed_forward(blk),
        )

    def _attention(self, blk: str, il: int) -> Attention:
        c = self.config
        return Attention(
            attn_q=self._matrix(blk + "attn_q.weight", 2 * c.n_head * c.d_k, c.n_embd),
            attn_k=self._matrix(blk + "attn_k.weight", c.n_head_kv * c.d_k, c.n_embd),
            attn_v=self._matrix(blk + "attn_v.weight", c.n_head_kv * c.d_v, c.n_embd),
            attn_output=self._matrix(blk + "attn_output.weight", c.n_embd, c.n_head * c.d_v),
            heads=self._heads(blk, il, normed="qk", gated=True),
        )

    def _recurrent(self, blk: str) -> Recurrent:
        c, net = self.config, self.config.delta_net
        assert net is not None
        d_v = net.n_v * net.state_size
        return Recurrent(
            attn_qkv=self._matrix(blk + "attn_qkv.weight", net.n_channels, c.n_embd),
            attn_gate=self._matrix(blk + "attn_gate.weight", d_v, c.n_embd),
            ssm_alpha_beta=self._alpha_beta(blk, net.n_v),
            ssm_out=self._matrix(blk + "ssm_out.weight", c.n_embd, d_v),
            net=DeltaNet(
                *(net.n_k, net.n_v, net.state_size, net.n_conv, c.norm_eps),
                conv1d=self._vector(blk + "ssm_conv1d.weight", net.n_channels, net.n_conv),
                a=self._vector(blk + "ssm_a", net.n_v),
                dt=self._vector(blk + "ssm_dt.bias", net.n_v),
                norm=self._vector(blk + "ssm_norm.weight", net.state_size),
            ),
        )

    def _alpha_beta(self, blk: str, n_v: int) -> tuple[Matrix, ...]:
        weights = [self._weight(f"{blk}ssm_{name}.weight", n_v, self.config.n_embd) for name in ("alpha", "beta")]
        if weights[0].format == weights[1].format:
            weights = [stacked(f"{blk}ssm_alpha and ssm_beta", *weights)]
        return tuple(self.ops.weight(weight) for weight in weights)

    def block(self, il: int, x: Array, batch: Pass[Array]) -> Array:
        """One layer of the trunk: residual stream in, residual stream out, float32 [rows, n_embd]."""
        return self.layer(self.layers[il], il, x, batch)

    def layer(self, layer: Layer, il: int, x: Array, batch: Pass[Array]) -> Array:
        """One layer with memory ``il`` of the cache: residual stream in, residual stream out, float32 [rows, n_embd]."""
        ops, c, memory = self.ops, self.config, self.cache.layers[il]
        a = ops.rms_norm(x, layer.attn_norm, c.norm_eps)
        mixer = layer.mixer
        if isinstance(mixer, Recurrent):
            u, z, *gates = ops.matmul(a, mixer.attn_qkv, mixer.attn_gate, *mixer.ssm_alpha_beta)
            o = ops.gated_norm(ops.delta_net(mixer.net, u, gates, memory, batch), mixer.net.norm, z, c.norm_eps)
            x = ops.matmul_add(x, o, mixer.ssm_out)
        else:
            q, k, v = ops.matmul(a, mixer.attn_q, mixer.attn_k, mixer.attn_v)
            o = ops.attention(mixer.heads, q, k, v, memory, batch, self.rotary.table)
            x = ops.matmul_add(x, o, mixer.attn_output)
        b = ops.rms_norm(x, layer.post_attention_norm, c.norm_eps)
        return feed_forward(ops, layer.ffn, x, b)
