"""luna_torch: the models of luna.h as PyTorch modules with the same parameter names: trained there and run here, or the
converse.

     import luna_torch
     model = luna_torch.load("model.safetensors")                  what luna_save wrote
     logits = model(tokens, lengths)                               [batch,n] and [batch] or None; luna.h's to 1e-5
     model = luna_torch.LM(vocab=256, layers=2, dim=128, heads=4)  or Classifier, MaskedLM, Seq2Seq, to train here
     model = luna_torch.LM(features=3, outputs=2)                  of numbers [batch,n,3], not tokens; or Classifier
     model.input_norm.fit(features)                                encoder.input_norm of a Classifier; before training
     luna_torch.save(model, "model.safetensors")                   what luna_load_model opens, in float

A config has luna.h's fields and defaults, with enums by value, flags 0 or 1 and dropouts in 10^-9. A file in 8 bits
loads as the floats that it stands for. With Luna attention alone; equations are those of arXiv 2106.01540v2. Needs
torch alone. Not made for speed: (7) stores n d l numbers."""
import difflib, json, math, os, struct
import torch
from torch import nn
from torch.nn import functional as F

ACTIVATION = [None, F.relu, F.gelu, lambda x: F.elu(x) + 1, F.softplus, lambda x: F.softplus(x, math.log(2)),
              torch.sigmoid, F.silu, torch.tanh, F.leaky_relu, lambda x: x]
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
          "I8": torch.int8}
TIED, FULL, NO_KEY, QK = range(4)                                  # luna_sharing
CONSTANT, GATED, ROUTED = 1, 2, 3                                  # luna_forget
NO_POSITIONS, SINUSOIDAL, LEARNED = 1, 2, 3                        # luna_positions
CLS, MEAN, MEMORY, MEMORY_BATCH = 1, 2, 3, 4                       # luna_pooling

FIELDS = """vocab layers dim heads memory ffn convolution sharing activation gated omega pre_norm attention positions
max_length features outputs norm forget output_gate rotary output_norm dropout attention_dropout activation_dropout
horizon fixed_horizon recompute pack_heads first_position embedding_scale norm_embedding tied_layers own_memory
keep_padding classes pooling pre_logits pair
per_step target_vocab share_embeddings separate_output decoder_layers max_target_length format""".split()

class Config(dict):
    def __init__(self, given, **defaults):
        for name, value in given.items():
            if name in FIELDS and value and int(value) != value:
                raise TypeError("%s is %r; fields are whole numbers, and dropouts are in 10^-9" % (name, value))
            if name in FIELDS: continue
            near = difflib.get_close_matches(name, FIELDS, 1)
            raise TypeError("a config has no field %r%s" % (name, "; did you mean %r?" % near[0] if near else ""))
        super().__init__(vocab=256, layers=2, dim=128, heads=4, memory=16, max_length=512, activation=1, **defaults)
        self.update((name, value) for name, value in given.items() if value)
        self.setdefault("ffn", 4 * self.dim)
        if self.attention: raise ValueError("luna_torch has Luna attention alone")
        if self.rotary: raise ValueError("luna_torch has no rotary positions")
    def __getattr__(self, name): return self.get(name, 0)

def table(c, rows): return nn.Parameter(torch.randn(rows, c.dim) / math.sqrt(c.dim))
def norm(c): return nn.RMSNorm(c.dim, 1e-5) if c.norm else nn.LayerNorm(c.dim)
# real [batch,n]: not padding; None: all
def masked(x, real): return x if real is None else x * real[..., None]
def real_of(x, lengths):
    return None if lengths is None else torch.arange(x.shape[1], device=x.device) < lengths[:, None]
def split(x, heads): return x.unflatten(-1, (heads, -1)).transpose(1, 2)            # [batch,n,h d_h] -> [batch,h,n,d_h]

def attention(q, k, v, heads, real, dropout):                      # (1); of no real key: zeros
    seen = None if real is None else real[:, None, None]
    y = F.scaled_dot_product_attention(split(q, heads), split(k, heads), split(v, heads), seen, dropout)
    y = y.transpose(1, 2).flatten(2)
    return y if real is None else y.masked_fill(~real.any(1)[:, None, None], 0)

def causal_product(x, y, z, horizon=0):                            # (7) F_t = 1/t X_t sum_{j<=t} Y_j^T Z_j
    t = torch.arange(1, x.shape[2] + 1, device=x.device)
    if horizon and len(t) > horizon:                               # from there on an exponential mean
        beyond = (t - horizon).clamp(min=0)
        share = (1 - 1 / horizon) ** (beyond[:, None] - beyond).clamp(min=0) / t.clamp(max=horizon)[:, None]
        return (x @ y.mT * share.tril().to(x)) @ z
    sums = torch.cumsum(y[..., :, None] * z[..., None, :], 2)
    return (x[..., None, :] @ sums)[..., 0, :] / t[:, None]
def past(scores, gates):                                           # -> [b,h,t,j,l], what slots have of row j at row t
    logs = (F.logsigmoid(gates) / 16).clamp(min=-1).cumsum(2)
    a = (scores.clamp(-15, 15) - logs)[:, :, None].expand(-1, -1, scores.shape[2], -1, -1)
    seen = torch.ones(a.shape[2:4], dtype=torch.bool, device=a.device).tril()
    return a.masked_fill(~seen[..., None], -math.inf).softmax(3)

def route(router, strength):                                       # -> w [b,h,n,l], what tokens write into two slots
    best = router.sort(dim=-1, descending=True, stable=True).indices[..., :2]
    r = torch.zeros_like(router).scatter(-1, best, F.logsigmoid(router.gather(-1, best)).softmax(-1))
    return -torch.expm1(-strength.clamp(-15, 15).sigmoid() * r)
def routed_past(w, fade):                                          # as past, and z [b,h,t,l], what slots weigh
    logs = (torch.log1p(-w) - fade.sigmoid()[:, None, None] / 4).cumsum(2)
    seen = torch.ones(w.shape[2], w.shape[2], dtype=torch.bool, device=w.device).tril()[..., None]
    a = w[:, :, None] * (logs[:, :, :, None] - logs[:, :, None]).masked_fill(~seen, -math.inf).exp()
    z = a.sum(3)
    return a / z.clamp(min=1e-38)[:, :, :, None], z

class Standard(nn.Module):                                         # input_norm, whose scale divides, and output_norm
    def __init__(self, size, divides):
        super().__init__()
        self.divides = divides
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
    def fit(self, x):                                              # [...,size], of training; NaN is missing
        x = x.float()                                              # as the model reads it: a constant's mean is exact
        x = x.masked_fill(~x.isfinite(), math.nan).flatten(0, -2).double()
        deviation = ((x - (mean := x.nanmean(0))) ** 2).nanmean(0).sqrt()
        deviation = torch.where(deviation > 0, deviation, 1)
        self.mean.copy_(mean.nan_to_num()), self.scale.copy_(1 / deviation if self.divides else deviation)

class Part(nn.Module):
    def __init__(self, c, linears=(), norms=()):
        super().__init__()
        self.c = c
        for name in norms: setattr(self, name, norm(c))
        for name in linears: self.linear(name, c.dim, c.dim, 1 if name == "out_proj" else math.sqrt(0.5))
    def linear(self, name, rows, columns, gain=1.0, bias=True):
        setattr(self, name, layer := nn.Linear(columns, rows, bias))
        nn.init.xavier_uniform_(layer.weight, gain)
        if bias: nn.init.zeros_(layer.bias)
        if name == "out_proj" and self.c.output_gate: self.linear("gate_proj", rows, rows, math.sqrt(0.5))
    def drop(self, x, which="dropout"): return F.dropout(x, self.c.get(which, 0) * 1e-9, self.training)
    def out(self, x, y): return self.out_proj(y * F.silu(self.gate_proj(x)) if self.c.output_gate else y)

class NestedAttention(Part):                                       # (3), (4), (5)
    def __init__(self, c):
        self.value = "c_proj" if c.sharing == TIED else "v_proj"   # NO_KEY: the key is the context itself
        self.key = {TIED: "c_proj", FULL: "k_proj", NO_KEY: None, QK: "q_proj"}[c.sharing]
        names = {"q_proj", self.key, self.value} - {None}
        super().__init__(c, ["out_proj", *names, *("p" + name for name in names)])
    def attend(self, prefix, x, context, heads, real):
        q, k, v = (self._modules[prefix + name](y) if name else y
                   for name, y in (("q_proj", x), (self.key, context), (self.value, context)))
        return attention(q, k, v, heads, real, self.c.attention_dropout * 1e-9 if self.training else 0.0)
    def forward(self, x, p, context, real):
        y_p = self.attend("p", p, context, self.c.pack_heads or self.c.heads, real)
        y_x = self.attend("", x, y_p, self.c.heads, None if real is None else real[:, :p.shape[1]])
        return self.out(x, y_x), y_p

class CausalAttention(Part):                                       # section 3.3
    def __init__(self, c):
        self.key, self.value = ("k_proj", "v_proj") if c.sharing == FULL else ("c_proj", "c_proj")
        pack = ["pq_proj", "pc_proj"] if c.forget != ROUTED else []
        super().__init__(c, [*pack, "q_proj", "out_proj", *{self.key, self.value}])
        if c.forget == ROUTED:                                     # slots fade within 16 to 1024 or 4096 tokens
            self.linear("router_proj", c.heads * c.memory, c.dim)
            self.linear("strength_proj", c.heads, c.dim, 0.5)
            exponents, longest = torch.arange(c.heads) / max(c.heads - 1, 1), 1024 if c.memory <= 16 else 4096
            times = 16 * (longest / 16) ** exponents if c.heads > 1 else torch.tensor([128.0])
            self.fade = nn.Parameter(torch.logit(4 / times))
        if c.forget not in (CONSTANT, GATED): return
        self.forget_proj = nn.Linear(c.dim, c.heads * c.memory)    # the slots forget within 8 to 1024 tokens
        times = 8 * 128 ** (torch.arange(c.memory) / (c.memory - 1) if c.memory > 1 else torch.tensor([0.5]))
        nn.init.xavier_uniform_(self.forget_proj.weight, 0.5)
        self.forget_proj.bias.data = -torch.expm1(16 / times).log().repeat(c.heads)
        if c.forget == CONSTANT: self.forget_proj.weight = None
    def gates(self, x, slots):
        gates = self.forget_proj.bias.expand(*x.shape[:2], -1) if self.c.forget == CONSTANT else self.forget_proj(x)
        return split(gates, self.c.heads)[..., :slots]
    def routed(self, x):
        q, k, v, w = (split(self._modules[name](x), self.c.heads) for name in
                      ("q_proj", self.key, self.value, "router_proj"))
        w = route(w, self.strength_proj(x).mT[..., None])
        share, z = routed_past(w, self.fade)
        scores = torch.einsum("bhtd,bhjd,bhtjl->bhtl", q * math.sqrt(self.c.heads / self.c.dim), k, share)
        p = (scores + z.clamp(min=1e-12).log()).masked_fill(z < 1e-12, -math.inf).softmax(-1)
        y = torch.einsum("bhtl,bhtjl,bhjd->bhtd", self.drop(p, "attention_dropout"), share, v)
        return self.out(x, y.transpose(1, 2).flatten(2))
    def forward(self, x, p, slots=None):
        if self.c.forget == ROUTED: return self.routed(x)
        pq, pc, q, k, v = (split(self._modules[name](y), self.c.heads) for name, y in
                           (("pq_proj", p), ("pc_proj", x), ("q_proj", x), (self.key, x), (self.value, x)))
        scale = math.sqrt(self.c.heads / self.c.dim)
        scores = pc @ (pq * scale).mT
        pack = past(scores, self.gates(x, p.shape[1])) if self.c.forget else ACTIVATION[self.c.omega or 5](scores)
        unpack = torch.einsum("bhtd,bhjd,bhtjl->bhtl", q * scale, k, pack) if self.c.forget else (
            causal_product(q * scale, k, pack, self.c.horizon))
        if slots is not None: unpack = unpack.masked_fill(~slots[:, None, None], -math.inf)
        w = self.drop(torch.softmax(unpack, -1), "attention_dropout")
        y = torch.einsum("bhtl,bhtjl,bhjd->bhtd", w, pack, v) if self.c.forget else (
            causal_product(w, pack, v, self.c.horizon))
        return self.out(x, y.transpose(1, 2).flatten(2))

class Layer(Part):                                                 # (6), and its form with the norms first
    def __init__(self, c, *norms):
        super().__init__(c, norms=norms + ("final_layer_norm",))
        self.linear("fc1", c.ffn, c.dim)
        self.linear("fc2", c.dim, c.ffn)
        if c.gated: self.linear("fc3", c.ffn, c.dim)
    def normed(self, x, norm): return norm(x) if self.c.pre_norm else x
    def residual(self, x, y, norm): return x + self.drop(y) if self.c.pre_norm else norm(x + self.drop(y))
    def feed_forward(self, x):
        y = self.normed(x, self.final_layer_norm)
        hidden = ACTIVATION[self.c.activation](self.fc1(y)) * (self.fc3(y) if self.c.gated else 1)
        return self.residual(x, self.fc2(self.drop(hidden, "activation_dropout")), self.final_layer_norm)
    def nested(self, attn, x, p, context, real, norm, memory_norm):
        y, q = self.normed(x, norm), self.normed(p, memory_norm)
        y_x, y_p = attn(y, q, y if context is None else context, real)
        return self.residual(x, y_x, norm), self.residual(p, y_p, memory_norm)

class EncoderLayer(Layer):
    def __init__(self, c):
        super().__init__(c, "self_attn_layer_norm", "self_atten_proj_layer_norm")
        self.self_attn = NestedAttention(c)
        if c.own_memory: self.projected_embeddings = table(c, c.memory)
    def forward(self, x, p, real):
        if self.c.own_memory: p = self.projected_embeddings[:x.shape[1]].expand(len(x), -1, -1)
        x, p = self.nested(self.self_attn, x, p, None, real, self.self_attn_layer_norm, self.self_atten_proj_layer_norm)
        return self.feed_forward(x), p

class DecoderLayer(Layer):
    def __init__(self, c):
        super().__init__(c, "self_attn_layer_norm", "encoder_attn_layer_norm", "encoder_atten_proj_layer_norm")
        self.self_attn, self.encoder_attn = CausalAttention(c), NestedAttention(c)
    def forward(self, x, p, context, real):
        y = self.self_attn(self.normed(x, self.self_attn_layer_norm), p, None if real is None else real[:, :p.shape[1]])
        x = self.residual(x, y, self.self_attn_layer_norm)
        x, p = self.nested(self.encoder_attn, x, p, context, real, self.encoder_attn_layer_norm,
                           self.encoder_atten_proj_layer_norm)
        return self.feed_forward(x), p

class CausalLayer(Layer):
    def __init__(self, c):
        super().__init__(c, "self_attn_layer_norm")
        self.self_attn, self.conv = CausalAttention(c), nn.Identity()
        self.projected_embeddings = table(c, c.memory) if c.forget != ROUTED else None
        if c.convolution:                                          # over this token and those before
            self.conv = nn.Conv1d(c.dim, c.dim, c.convolution, groups=c.dim)
            self.conv.weight.data.uniform_(-0.1, 0.1)[..., -1] += 1
    def forward(self, x):
        y = self.normed(x, self.self_attn_layer_norm)
        if self.c.convolution: y = self.conv(F.pad(y.mT, (self.c.convolution - 1, 0))).mT
        p = None if self.projected_embeddings is None else self.projected_embeddings[None]
        return self.feed_forward(self.residual(x, self.self_attn(y, p), self.self_attn_layer_norm))

class Embedded(Part):                                              # tokens and positions to vectors
    def __init__(self, c, vocab, max_length, norms):
        super().__init__(c, norms=norms)
        if vocab and c.features:
            self.input_norm = Standard(c.features, True)
            self.linear("input_proj", c.dim, c.features)
        elif vocab: self.embed_tokens = nn.Embedding(vocab, c.dim, _weight=table(c, vocab))
        rows = c.first_position + max_length
        if c.positions == LEARNED: self.embed_positions = nn.Embedding(rows, c.dim, _weight=table(c, rows))
        plain = c.embedding_scale == 1 or (not c.embedding_scale and c.positions == LEARNED)
        self.scale = 1 if plain else math.sqrt(c.dim)
    def positioned(self, x, first, learned=True):
        rows, half = torch.arange(first, first + x.shape[-2], device=x.device), self.c.dim // 2
        if self.c.positions == LEARNED and learned: return x + self.embed_positions(rows)
        if self.c.positions != SINUSOIDAL: return x
        turns = torch.exp(torch.arange(half) * -(math.log(10000) / max(half - 1, 1))).double().to(x.device)
        angles = turns * rows[:, None]
        return x + F.pad(torch.cat([angles.sin(), angles.cos()], 1), (0, self.c.dim % 2)).to(x)
    def read(self, x, real, weight):                               # tokens, or features, of which NaN and padding miss
        if not self.c.features:
            return F.embedding(x, self.embed_tokens.weight if weight is None else weight) * self.scale
        missing = x.isnan() if real is None else x.isnan() | ~real[..., None]
        x = (x.masked_fill(missing, 0) - self.input_norm.mean) * self.input_norm.scale
        return self.input_proj(x.masked_fill(missing, 0))
    def embed(self, x, real, keep_padding, weight=None, norm=nn.Identity()):
        x = self.positioned(self.read(x, real, weight), self.c.first_position)
        x = self.drop(norm(masked(x, real if keep_padding else None)))
        return x if keep_padding else masked(x, real)

class Encoder(Embedded):
    def __init__(self, c):
        norms = ["emb_layer_norm", "proj_emb_layer_norm"] if c.norm_embedding else []
        norms += ["layer_norm", "proj_layer_norm"] if c.pre_norm else []
        super().__init__(c, c.vocab, c.max_length,
                         [name for name in norms if name != "proj_emb_layer_norm" or not c.own_memory])
        if not c.own_memory: self.projected_embeddings = table(c, c.memory)
        self.layers = nn.ModuleList(EncoderLayer(c) for _ in range(1 if c.tied_layers else c.layers))
    def forward(self, tokens, lengths=None, p=None):               # -> X [batch,n,d], P [batch,l,d]
        c, real, one = self.c, real_of(tokens, lengths), nn.Identity()
        x = self.embed(tokens, real, c.keep_padding, norm=self._modules.get("emb_layer_norm", one))
        if p is None and not c.own_memory:
            slots = min(c.memory, tokens.shape[1] if real is None else max(1, int(lengths.max())))
            p = self.positioned(self.projected_embeddings[:slots] * self.scale, 0, learned=False)
            p = self.drop(self._modules.get("proj_emb_layer_norm", one)(p).expand(len(x), -1, -1))
            if real is not None and not c.keep_padding: p = masked(p, real[:, :slots])
        for i in range(c.layers): x, p = self.layers[0 if c.tied_layers else i](x, p, real)
        if c.pre_norm: x, p = self.layer_norm(x), self.proj_layer_norm(p)
        return x if c.keep_padding else masked(x, real), p

class LM(Embedded):
    kind = "causal_lm"
    def __init__(self, **config):
        c = Config(config, omega=5, positions=NO_POSITIONS, embedding_scale=1)
        super().__init__(c, c.vocab, c.max_length, ["layer_norm"] if c.pre_norm else [])
        self.layers = nn.ModuleList(CausalLayer(c) for _ in range(c.layers))
        if c.features: c.setdefault("outputs", c.features)
        if c.outputs: self.linear("output_projection", c.outputs, c.dim)
        if c.output_norm: self.output_norm = Standard(c.outputs, False)
    def forward(self, tokens, lengths=None):                       # -> logits [batch,n,vocab or outputs]
        x = self.drop(self.positioned(self.read(tokens, real_of(tokens, lengths), None), 0))
        for layer in self.layers: x = layer(x)
        if self.c.pre_norm: x = self.layer_norm(x)
        y = self.output_projection(x) if self.c.outputs else F.linear(x, self.embed_tokens.weight)
        return y * self.output_norm.scale + self.output_norm.mean if self.c.output_norm else y

class Classifier(Part):
    kind = "classifier"
    def __init__(self, **config):
        super().__init__(Config({"classes": 2, "pooling": MEMORY, "positions": SINUSOIDAL, **config}))
        features, hidden = self.c.dim * (4 if self.c.pair else 1), self.c.pre_logits
        self.encoder, self.pre_logits = Encoder(self.c), Part(self.c)
        if hidden: self.pre_logits.linear("0", hidden, features)
        self.linear("sentence_projection_layer", self.c.classes, hidden or features, bias=False)
    def pool(self, tokens, lengths):
        x, p = self.encoder(tokens, lengths)
        if self.c.pooling == CLS: return x[:, 0]
        rows = x if self.c.pooling == MEAN else p
        if lengths is None or self.c.pooling == MEMORY_BATCH: return rows.mean(1)
        return masked(rows, real_of(rows, lengths)).sum(1) / lengths.clamp(1, rows.shape[1])[:, None]
    def forward(self, tokens, lengths=None, tokens2=None, lengths2=None):
        """-> logits [batch,classes], or [batch,n,classes]"""
        a = self.encoder(tokens, lengths)[0] if self.c.per_step else self.pool(tokens, lengths)
        if self.c.pair: a = torch.cat([a, b := self.pool(tokens2, lengths2), a * b, a - b], 1)
        if self.c.pre_logits: a = F.gelu(self.pre_logits._modules["0"](a))
        return self.sentence_projection_layer(self.drop(a))

class MaskedLM(Part):
    kind = "masked_lm"
    def __init__(self, **config):
        super().__init__(Config({"vocab": 257, "positions": SINUSOIDAL, **config}))
        self.encoder, self.lm_head = Encoder(self.c), Part(self.c, ["dense"], ["layer_norm"])
        self.lm_head.bias = nn.Parameter(torch.zeros(self.c.vocab))
    def forward(self, tokens, lengths=None):                       # -> logits [batch,n,vocab]
        x = self.lm_head.layer_norm(F.gelu(self.lm_head.dense(self.encoder(tokens, lengths)[0])))
        return F.linear(x, self.encoder.embed_tokens.weight, self.lm_head.bias)

class Seq2Seq(Part):
    kind = "seq2seq"
    def __init__(self, **config):
        super().__init__(c := Config({"positions": SINUSOIDAL, "embedding_scale": 2, **config}))
        vocab, norms = c.target_vocab or c.vocab, ["layer_norm", "proj_layer_norm"] if c.pre_norm else []
        self.encoder = Encoder(c)
        self.decoder = Embedded(c, 0 if c.share_embeddings else vocab, c.max_target_length or c.max_length, norms)
        self.decoder.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.decoder_layers or c.layers))
        if c.separate_output: self.decoder.linear("output_projection", vocab, c.dim, bias=False)
    def forward(self, source, source_lengths, target, target_lengths=None): # -> logits [batch,m,target_vocab]
        d, weight = self.decoder, (self.encoder if self.c.share_embeddings else self.decoder).embed_tokens.weight
        context, p = self.encoder(source, source_lengths)
        x = d.embed(target, real_of(target, target_lengths), True, weight)
        for layer in d.layers: x, p = layer(x, p, context, real_of(source, source_lengths))
        return F.linear(d.layer_norm(x) if self.c.pre_norm else x,
                        d.output_projection.weight if self.c.separate_output else weight)

def load(path):
    with open(path, "rb") as file: data = bytearray(file.read())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    meta, kinds = header.pop("__metadata__", {}), {kind.kind: kind for kind in (LM, Classifier, MaskedLM, Seq2Seq)}
    if meta.get("luna.kind") not in kinds: raise ValueError(path + " holds no model of luna.h")
    if "luna.hook" in meta: raise ValueError(path + " has the attention hook " + meta["luna.hook"] + ", not in PyTorch")
    if meta.get("luna.attention") == "3": raise ValueError(path + " has the attention hook linformer, not in PyTorch")
    config = {key[5:]: int(value) for key, value in meta.items() # older files have Linformer's keys, which are 0
              if key.startswith("luna.") and value.isdigit() and len(value) < 10 and ".linformer_" not in key}
    model = kinds[meta["luna.kind"]](**config)
    model.pairs = {key: value for key, value in meta.items() if not key.startswith("luna.")}
    shapes = {name: parameter.shape for name, parameter in model.state_dict().items()}
    def values(t):
        return torch.frombuffer(data, dtype=DTYPES[t["dtype"]], offset=start + t["data_offsets"][0],
                                count=math.prod(t["shape"])).reshape(t["shape"])
    def tensor(name, t):                                           # of 8 bits: each row times its scale
        x = values(t)
        if t["dtype"] == "I8": x = x.float() * values(header[name + ".scale"])[:, None]
        return x.reshape(shapes[name])
    scales = {name + ".scale" for name, t in header.items() if t["dtype"] == "I8"}
    model.load_state_dict({name: tensor(name, t) for name, t in header.items()
                           if not name.startswith("luna.") and name not in scales})  # luna.: an optimiser's
    return model.eval()

def save(model, path):
    header, data = {"__metadata__": {"luna.kind": model.kind, **getattr(model, "pairs", {})}}, bytearray()
    header["__metadata__"].update(("luna." + name, str(int(value))) for name, value in model.c.items())
    if model.c.forget or model.c.output_gate:
        header["__metadata__"]["luna.format"] = "3" if model.c.forget == ROUTED else "2"
    for name, t in model.state_dict().items():
        size = len(data)
        data += bytes(4 * t.numel())
        torch.frombuffer(data, dtype=torch.float32, offset=size)[:] = t.flatten()
        header[name] = {"dtype": "F32", "shape": list(t.squeeze(1).shape if name.endswith("conv.weight") else t.shape),
                        "data_offsets": [size, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = os.path.realpath(path)                                  # a link stays one
    old = os.stat(path) if os.path.exists(path) else None
    beside = os.path.join(os.path.dirname(path), ".luna_torch-%d.tmp" % os.getpid())
    if old and not os.path.isfile(path): beside = path             # a pipe or a device has nothing to lose
    try:                                                           # an old file stays until the new one is whole
        with open(beside, "wb") as file: file.write(struct.pack("<Q", len(text)) + text + data)
        if old and beside != path: os.chmod(beside, old.st_mode)
        if beside != path: os.replace(beside, path)
    except BaseException:
        if beside != path and os.path.exists(beside): os.remove(beside)
        raise
