"""luna_torch: the models of luna.h as PyTorch modules with the same parameter names: trained there and run here, or the converse.

     import luna_torch
     model = luna_torch.load("model.safetensors")                  what luna_save wrote
     logits = model(tokens, lengths)                               [batch,n] and [batch] or None; luna.h's to 1e-5
     model = luna_torch.LM(vocab=256, layers=2, dim=128, heads=4)  or Classifier, MaskedLM, Seq2Seq, to train here
     luna_torch.save(model, "model.safetensors")                   what luna_load_model opens

A config has luna.h's fields by name: enums by value, flags 0 or 1, dropouts in 10^-9, and luna.h's defaults. Luna attention
alone; equations are those of arXiv 2106.01540v2. Needs torch and nothing else. Not made for speed: (7) stores n d l numbers."""
import ctypes, json, math, struct
import torch
from torch import nn
from torch.nn import functional as F

ACTIVATION = [None, F.relu, F.gelu, lambda x: F.elu(x) + 1, F.softplus, lambda x: F.softplus(x, math.log(2))]
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
TIED, FULL = 0, 1                                                  # luna_sharing
NO_POSITIONS, SINUSOIDAL, LEARNED = 1, 2, 3                        # luna_positions
CLS, MEAN, MEMORY, MEMORY_BATCH = 1, 2, 3, 4                       # luna_pooling

class Config(dict):
    def __getattr__(self, name): return self.get(name, 0)

def linear(rows, columns, gain=1.0, bias=True):
    layer = nn.Linear(columns, rows, bias)
    nn.init.xavier_uniform_(layer.weight, gain)
    if bias: nn.init.zeros_(layer.bias)
    return layer

def table(c, rows): return nn.Parameter(torch.randn(rows, c.dim) / math.sqrt(c.dim))
def split(x, heads): return x.unflatten(-1, (heads, -1)).transpose(1, 2)             # [batch,n,h d_h] -> [batch,h,n,d_h]
def merge(x): return x.transpose(1, 2).flatten(2)
def masked(x, real): return x if real is None else x * real[..., None]              # real [batch,n]: not padding; None: all
def real_of(tokens, lengths): return None if lengths is None else torch.arange(tokens.shape[1], device=tokens.device)[None] < lengths[:, None]

def attention(q, k, v, heads, real, dropout):                      # (1); of no real key: zeros
    y = F.scaled_dot_product_attention(split(q, heads), split(k, heads), split(v, heads), None if real is None else real[:, None, None], dropout)
    return merge(y if real is None else y.masked_fill(~real.any(1)[:, None, None, None], 0))

def causal_product(x, y, z):                                       # (7) F_t = 1/t X_t sum_{j<=t} Y_j^T Z_j
    sums = torch.cumsum(y[..., :, None] * z[..., None, :], 2)
    return (x[..., None, :] @ sums)[..., 0, :] / torch.arange(1, x.shape[2] + 1, device=x.device)[:, None]

class Part(nn.Module):
    def __init__(self, c, linears=(), norms=()):
        super().__init__()
        self.c = c
        for name in linears: setattr(self, name, linear(c.dim, c.dim, 1 if name == "out_proj" else math.sqrt(0.5)))
        for name in norms: setattr(self, name, nn.LayerNorm(c.dim))
    def drop(self, x): return F.dropout(x, self.c.dropout * 1e-9, self.training)
    def attention_dropout(self): return self.c.attention_dropout * 1e-9 if self.training else 0.0

class NestedAttention(Part):                                       # (3), (4), (5)
    def __init__(self, c):
        shared = [["pc_proj", "c_proj"], ["pk_proj", "pv_proj", "k_proj", "v_proj"], ["pv_proj", "v_proj"], ["pv_proj", "v_proj"]]
        super().__init__(c, ["pq_proj", "q_proj", "out_proj"] + shared[c.sharing])
    def projected(self, context, q, k, v, kv):                     # key and value: tied, full, no key, shared with the query's
        value = self._modules[kv if self.c.sharing == TIED else v](context)
        return [value, self._modules[k](context) if self.c.sharing == FULL else None, context, self._modules[q](context)][self.c.sharing], value
    def forward(self, x, p, context, real):
        slots = None if real is None else real[:, :p.shape[1]]
        y_p = attention(self.pq_proj(p), *self.projected(context, "pq_proj", "pk_proj", "pv_proj", "pc_proj"), self.c.pack_heads or self.c.heads,
                        real, self.attention_dropout())
        y = attention(self.q_proj(x), *self.projected(y_p, "q_proj", "k_proj", "v_proj", "c_proj"), self.c.heads, slots, self.attention_dropout())
        return self.out_proj(y), y_p

class CausalAttention(Part):                                       # section 3.3
    def __init__(self, c): super().__init__(c, ["pq_proj", "pc_proj", "q_proj"] + (["k_proj", "v_proj"] if c.sharing else ["c_proj"]) + ["out_proj"])
    def forward(self, x, p, slots=None):
        h, scale = self.c.heads, math.sqrt(self.c.heads / self.c.dim)
        k, v = (split(self._modules[name](x), h) for name in (["k_proj", "v_proj"] if self.c.sharing else ["c_proj", "c_proj"]))
        pack = ACTIVATION[self.c.omega or 5](split(self.pc_proj(x), h) @ split(self.pq_proj(p) * scale, h).mT)
        unpack = causal_product(split(self.q_proj(x) * scale, h), k, pack)
        unpack = torch.softmax(unpack if slots is None else unpack.masked_fill(~slots[:, None, None], -math.inf), -1)
        return self.out_proj(merge(causal_product(F.dropout(unpack, self.attention_dropout()), pack, v)))

class Layer(Part):                                                 # (6), and its form with the norms first
    def __init__(self, c, *norms):
        super().__init__(c, norms=norms + ("final_layer_norm",))
        self.fc1, self.fc2 = linear(c.ffn, c.dim), linear(c.dim, c.ffn)
    def normed(self, x, norm): return norm(x) if self.c.pre_norm else x
    def residual(self, x, y, norm): return x + self.drop(y) if self.c.pre_norm else norm(x + self.drop(y))
    def feed_forward(self, x):
        y = ACTIVATION[self.c.activation](self.fc1(self.normed(x, self.final_layer_norm)))
        return self.residual(x, self.fc2(F.dropout(y, self.c.activation_dropout * 1e-9, self.training)), self.final_layer_norm)
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
        x, p = self.nested(self.encoder_attn, self.residual(x, y, self.self_attn_layer_norm), p, context, real,
                           self.encoder_attn_layer_norm, self.encoder_atten_proj_layer_norm)
        return self.feed_forward(x), p

class Convolution(nn.Module):                                      # depthwise, over this token and those before
    def __init__(self, c):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(c.dim, c.convolution).uniform_(-0.1, 0.1)), nn.Parameter(torch.zeros(c.dim))
        self.weight.data[:, -1] += 1
    def forward(self, x): return F.conv1d(F.pad(x.mT, (self.weight.shape[1] - 1, 0)), self.weight[:, None], self.bias, groups=len(self.bias)).mT

class CausalLayer(Layer):
    def __init__(self, c):
        super().__init__(c, "self_attn_layer_norm")
        self.self_attn, self.projected_embeddings = CausalAttention(c), table(c, c.memory)
        self.conv = Convolution(c) if c.convolution else nn.Identity()
    def forward(self, x):
        y = self.self_attn(self.conv(self.normed(x, self.self_attn_layer_norm)), self.projected_embeddings[None])
        return self.feed_forward(self.residual(x, y, self.self_attn_layer_norm))

class Embedded(Part):                                              # tokens and positions to vectors
    def __init__(self, c, vocab, max_length, norms):
        super().__init__(c, norms=norms)
        tables = {"embed_tokens": vocab, "embed_positions": c.first_position + max_length if c.positions == LEARNED else 0}
        for name, rows in tables.items():
            if rows: setattr(self, name, nn.Embedding(rows, c.dim, _weight=table(c, rows).data))
    def scale(self): return 1 if self.c.embedding_scale == 1 or (not self.c.embedding_scale and self.c.positions == LEARNED) else math.sqrt(self.c.dim)
    def sinusoids(self, first, n):
        half = self.c.dim // 2
        angles = torch.exp(torch.arange(half) * -(math.log(10000) / max(half - 1, 1))).double() * torch.arange(first, first + n)[:, None]
        return F.pad(torch.cat([angles.sin(), angles.cos()], 1), (0, self.c.dim % 2)).float()
    def embed(self, tokens, real, keep_padding, weight, norm=None):
        x, first, n = F.embedding(tokens, weight) * self.scale(), self.c.first_position, tokens.shape[1]
        if self.c.positions == SINUSOIDAL: x = x + self.sinusoids(first, n).to(x)
        if self.c.positions == LEARNED: x = x + self.embed_positions.weight[first:first + n]
        if keep_padding: x = masked(x, real)
        x = self.drop(norm(x) if norm else x)
        return x if keep_padding else masked(x, real)

class Encoder(Embedded):
    def __init__(self, c):
        memory = not c.own_memory
        norms = ["emb_layer_norm"] + ["proj_emb_layer_norm"] * memory if c.norm_embedding else []
        super().__init__(c, c.vocab, c.max_length, norms + (["layer_norm", "proj_layer_norm"] if c.pre_norm else []))
        if memory: self.projected_embeddings = table(c, c.memory)
        self.layers = nn.ModuleList(EncoderLayer(c) for _ in range(1 if c.tied_layers else c.layers))
    def forward(self, tokens, lengths=None, p=None):               # -> X [batch,n,d], P [batch,l,d]
        c, norms, real = self.c, self._modules, real_of(tokens, lengths)
        x = self.embed(tokens, real, c.keep_padding, self.embed_tokens.weight, norms.get("emb_layer_norm"))
        if p is None and not c.own_memory:
            slots = min(c.memory, tokens.shape[1] if real is None else max(1, int(lengths.max())))
            p = self.projected_embeddings[:slots] * self.scale()
            if c.positions == SINUSOIDAL: p = p + self.sinusoids(0, slots).to(p)
            p = self.drop(norms.get("proj_emb_layer_norm", nn.Identity())(p).expand(len(x), -1, -1))
            if real is not None and not c.keep_padding: p = masked(p, real[:, :slots])
        for i in range(c.layers): x, p = self.layers[0 if c.tied_layers else i](x, p, real)
        if c.pre_norm: x, p = self.layer_norm(x), self.proj_layer_norm(p)
        return x if c.keep_padding else masked(x, real), p

def config_of(given, **defaults):
    c = Config(vocab=256, layers=2, dim=128, heads=4, memory=16, max_length=512, activation=1, **defaults)
    c.update((name, value) for name, value in given.items() if value)
    c.setdefault("ffn", 4 * c.dim)
    if c.attention or c.features: raise ValueError("luna_torch has Luna attention and tokens alone")
    return c

class LM(Embedded):
    kind = "causal_lm"
    def __init__(self, **config):
        c = config_of(config, omega=5, positions=NO_POSITIONS)
        super().__init__(c, c.vocab, c.max_length, ["layer_norm"] if c.pre_norm else [])
        self.layers = nn.ModuleList(CausalLayer(c) for _ in range(c.layers))
    def scale(self): return 1
    def forward(self, tokens, lengths=None):                       # -> logits [batch,n,vocab]
        x = self.embed(tokens, None, True, self.embed_tokens.weight)
        for layer in self.layers: x = layer(x)
        return F.linear(self.layer_norm(x) if self.c.pre_norm else x, self.embed_tokens.weight)

class Classifier(Part):
    kind = "classifier"
    def __init__(self, **config):
        super().__init__(config_of({"classes": 2, "pooling": MEMORY, "positions": SINUSOIDAL, **config}))
        features = self.c.dim * (4 if self.c.pair else 1)
        self.encoder = Encoder(self.c)
        self.pre_logits = nn.Sequential(linear(self.c.pre_logits, features), nn.GELU()) if self.c.pre_logits else nn.Identity()
        self.sentence_projection_layer = linear(self.c.classes, self.c.pre_logits or features, bias=False)
    def pool(self, tokens, lengths):
        x, p = self.encoder(tokens, lengths)
        if self.c.pooling == CLS: return x[:, 0]
        rows = x if self.c.pooling == MEAN else p
        if lengths is None or self.c.pooling == MEMORY_BATCH: return rows.mean(1)
        return masked(rows, real_of(rows, lengths)).sum(1) / lengths.clamp(1, rows.shape[1])[:, None]
    def forward(self, tokens, lengths=None, tokens2=None, lengths2=None): # -> logits [batch,classes]
        a = self.pool(tokens, lengths)
        if self.c.pair: a = torch.cat([a, b := self.pool(tokens2, lengths2), a * b, a - b], 1)
        return self.sentence_projection_layer(self.drop(self.pre_logits(a)))

class MaskedLM(Part):
    kind = "masked_lm"
    def __init__(self, **config):
        super().__init__(config_of({"vocab": 257, "positions": SINUSOIDAL, **config}))
        self.encoder, self.lm_head = Encoder(self.c), Part(self.c, norms=["layer_norm"])
        self.lm_head.dense, self.lm_head.bias = linear(self.c.dim, self.c.dim), nn.Parameter(torch.zeros(self.c.vocab))
    def forward(self, tokens, lengths=None):                       # -> logits [batch,n,vocab]
        x = self.lm_head.layer_norm(F.gelu(self.lm_head.dense(self.encoder(tokens, lengths)[0])))
        return F.linear(x, self.encoder.embed_tokens.weight, self.lm_head.bias)

class Decoder(Embedded):
    def __init__(self, c):
        vocab = c.target_vocab or c.vocab
        super().__init__(c, 0 if c.share_embeddings else vocab, c.max_target_length or c.max_length, ["layer_norm", "proj_layer_norm"] if c.pre_norm else [])
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.decoder_layers or c.layers))
        if c.separate_output: self.output_projection = nn.Linear(c.dim, vocab, bias=False)

class Seq2Seq(Part):
    kind = "seq2seq"
    def __init__(self, **config):
        super().__init__(config_of({"positions": SINUSOIDAL, "embedding_scale": 2, **config}))
        self.encoder, self.decoder = Encoder(self.c), Decoder(self.c)
    def forward(self, source, source_lengths, target, target_lengths=None): # -> logits [batch,m,target_vocab]
        d, real = self.decoder, real_of(source, source_lengths)
        weight = (self.encoder if self.c.share_embeddings else d).embed_tokens.weight
        context, p = self.encoder(source, source_lengths)
        x = d.embed(target, real_of(target, target_lengths), True, weight)
        for layer in d.layers: x, p = layer(x, p, context, real)
        return F.linear(d.layer_norm(x) if self.c.pre_norm else x, d.output_projection.weight if self.c.separate_output else weight)

def load(path):
    with open(path, "rb") as file: data = bytearray(file.read())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    meta, kinds = header.pop("__metadata__", {}), {kind.kind: kind for kind in (LM, Classifier, MaskedLM, Seq2Seq)}
    if meta.get("luna.kind") not in kinds: raise ValueError(path + " holds no model of luna.h")
    model = kinds[meta["luna.kind"]](**{key[5:]: int(value) for key, value in meta.items() if key.startswith("luna.") and value.isdigit() and len(value) < 10})
    model.pairs = {key: value for key, value in meta.items() if not key.startswith("luna.")}
    tensors = {name: torch.frombuffer(data, dtype=DTYPES[t["dtype"]], offset=start + t["data_offsets"][0], count=math.prod(t["shape"]))
               .float().reshape(t["shape"]) for name, t in header.items() if not name.startswith("luna.")} # luna.: an optimiser's
    model.load_state_dict(tensors)
    return model.eval()

def save(model, path):
    header, at, tensors = {"__metadata__": {"luna.kind": model.kind, **getattr(model, "pairs", {})}}, 0, model.state_dict()
    header["__metadata__"].update(("luna." + name, str(int(value))) for name, value in model.c.items())
    for name, t in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [at, at + 4 * t.numel()]}
        at += 4 * t.numel()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for t in tensors.values():
            t = t.detach().cpu().float().contiguous()
            file.write(ctypes.string_at(t.data_ptr(), 4 * t.numel()))
