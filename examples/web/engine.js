/* engine.js: luna.h for JavaScript. In the page it is the source of every worker; tests/programs/web.mjs runs it under
   node. */
'use strict';

class Luna {
  static async open(module) {
    const luna = new Luna();
    const clock = (id, precision, at) => {
      new DataView(luna.exports.memory.buffer).setBigUint64(at, BigInt(Math.round(performance.now() * 1e6)), true);
      return 0;
    };
    const instance = await WebAssembly.instantiate(module, {
      page: { write: (at, size) => luna.written.push(luna.bytes(at, size).slice()) },
      wasi_snapshot_preview1: { clock_time_get: clock },
    });
    luna.exports = instance.exports;
    luna.exports._initialize();
    return luna;
  }

  /* Views are made anew for each use: memory that grows has another buffer. */
  bytes(at, size) { return new Uint8Array(this.exports.memory.buffer, at, size); }
  floats(at, count) { return new Float32Array(this.exports.memory.buffer, at, count); }
  ints(at, count) { return new Int32Array(this.exports.memory.buffer, at, count); }
  error() {
    const at = this.exports.page_error(), all = this.bytes(at, 1000);
    return new TextDecoder().decode(all.slice(0, all.indexOf(0)));
  }
  need(result) {
    if (!result || Number.isNaN(result)) throw new Error(this.error());
    return result;
  }
  /* runs work(address) with that much memory, which is free afterwards */
  with(size, work) {
    const at = this.exports.malloc(size + 1);
    if (!at) throw new Error('There is no memory for ' + size + ' more bytes: a page has 2 GB at most.');
    try { return work(at); } finally { this.exports.free(at); }
  }
  withBytes(bytes, work) {
    return this.with(bytes.length, (at) => { this.bytes(at, bytes.length).set(bytes); return work(at); });
  }

  text(bytes) {
    const at = this.exports.malloc(bytes.length + 1);
    if (!at) throw new Error('The text has ' + bytes.length + ' bytes, for which there is no memory.');
    this.bytes(at, bytes.length).set(bytes);
    this.need(this.exports.page_text(at, bytes.length));
  }
  get settings() {
    const all = this.ints(this.exports.page_settings(), Luna.settings.length);
    return Object.fromEntries(Luna.settings.map((name, i) => [name, all[i]]));
  }
  set settings(values) {
    const all = this.ints(this.exports.page_settings(), Luna.settings.length);
    Luna.settings.forEach((name, i) => { if (name in values) all[i] = values[name]; });
  }
  model(settings) {
    this.settings = settings;
    this.need(this.exports.page_open());
  }
  get step() { return this.exports.page_step(); }
  get parameters() { return this.exports.page_parameters(); }
  train(lr, steps) { return this.need(this.exports.page_train(lr, steps)); }
  /* The mean loss of at most `most` windows of the last tenth, evenly spread, a batch at a time: the generator's last
     value is { done: true, value }. */
  *validating(most) {
    const all = this.exports.page_held(), each = this.settings.batch, rounds = Math.max(1, Math.floor(most / each));
    const skip = Math.max(each, Math.floor(all / rounds));
    let sum = 0, bytes = 0;
    for (let first = 0; first < all; first += skip) {
      const [loss, read] = this.with(4, (count) => {
        const mean = this.need(this.exports.page_validate(first, Math.min(each, all - first), count));
        return [mean, this.ints(count, 1)[0]];
      });
      sum += loss * read, bytes += read;
      yield;
    }
    return sum / bytes;
  }
  validate(most) {
    const all = this.validating(most);
    let each = all.next();
    while (!each.done) each = all.next();
    return each.value;
  }
  sample(prompt, count, temperature) {
    return this.withBytes(prompt, (from) => this.with(count, (to) => {
      this.need(this.exports.page_sample(from, prompt.length, to, count, temperature));
      return this.bytes(to, count).slice();
    }));
  }
  /* { pack, unpack, state }: of `layer`, each [heads, n, slots] */
  look(bytes, layer) {
    const { heads, memory } = this.settings, count = heads * memory * bytes.length;
    return this.withBytes(bytes, (from) => this.with(8 * count, (to) => {
      this.need(this.exports.page_look(from, bytes.length, layer, to));
      return { pack: this.floats(to, count).slice(), unpack: this.floats(to + 4 * count, count).slice(), heads,
               slots: memory, n: bytes.length, state: this.exports.page_state() };
    }));
  }
  save() {
    this.written = [];
    this.need(this.exports.page_save());
    const all = new Uint8Array(this.written.reduce((sum, part) => sum + part.length, 0));
    let at = 0;
    for (const part of this.written) all.set(part, at), at += part.length;
    this.written = [];
    return all;
  }
  load(bytes) { this.withBytes(bytes, (at) => this.need(this.exports.page_load(at, bytes.length))); }

  /* milliseconds of softmax attention and of Luna's pack and unpack: the fastest of some runs */
  time(n, l) {
    this.need(this.exports.page_time_open(n, l));
    return [0, 1].map((kind) => {
      let best = Infinity, runs = 1;
      const begin = performance.now();
      for (let round = 0; round < 3 || performance.now() - begin < 60; round++) {
        const start = performance.now();
        for (let i = 0; i < runs; i++) this.need(this.exports.page_time_run(kind));
        const took = performance.now() - start;
        best = Math.min(best, took / runs);
        if (took < 5) runs = Math.min(1000, runs * 4);     /* the clock of a page counts in tenths of milliseconds */
        if (performance.now() - begin > 1000) break;
      }
      return best;
    });
  }
  /* the numbers of equations (3) to (7) for x [4,3] and p [2,3]; a matrix is an array of rows in one */
  equations(x, p) {
    const at = this.exports.page_equations();
    this.floats(at, 12).set(x);
    this.floats(at + 48, 6).set(p);
    this.need(this.exports.page_follow());
    const out = {};
    let from = at;
    for (const [name, count] of Luna.equations) out[name] = [...this.floats(from, count)], from += 4 * count;
    return out;
  }
  detectorLearn(signal, labels, steps, told) {
    const bytes = (list) => new Uint8Array(list.buffer);
    return this.withBytes(bytes(signal), (x) => this.withBytes(bytes(labels), (y) => {
      this.need(this.exports.page_detector_open(x, signal.length));
      let loss = 0;
      for (let step = 0; step < steps; step++) {
        loss = this.need(this.exports.page_detector_learn(x, y, signal.length, steps));
        if (told) told(step + 1, loss);
      }
      return loss;
    }));
  }
  detectorRead(signal) {
    return this.withBytes(new Uint8Array(signal.buffer), (x) => this.with(4 * signal.length, (to) => {
      this.need(this.exports.page_detector_read(x, signal.length, to));
      return this.floats(to, signal.length).slice();
    }));
  }
}
Luna.settings = ['layers', 'dim', 'heads', 'memory', 'window', 'batch', 'softmax', 'seed'];
Luna.equations = [['x', 12], ['p', 6], ['pack', 8], ['yp', 6], ['unpack', 8], ['yx', 12], ['xa', 12], ['nextp', 6],
  ['nextx', 12], ['z', 8], ['sums', 24], ['f', 8]];

/* ---- a worker: requests { id, call, ... } are answered by { id, ... }, and training tells what it does ----------- */
/* What a worker does between two steps it does at once: answers wait for one step at most. */
function serve(scope) {
  let luna = null, run = null;
  const tell = (message, list) => scope.postMessage(message, list || []);
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => train();

  function train() {
    if (!run) return;
    const r = run;
    try {
      if (r.check) check(r);
      else step(r);
      if (r.ended && !r.check) run = null, tell({ what: 'ended', step: luna.step });
    } catch (error) {
      run = null;
      tell({ what: 'failed', error: error.message, step: luna.step });
    }
    if (run) port2.postMessage(0);
  }
  function step(r) {
    const start = performance.now();
    r.losses.push(luna.train(r.lr, r.steps));
    const now = performance.now();
    r.seconds += (now - start) / 1000;
    r.times.push(r.seconds);
    r.ended = luna.step >= r.steps;
    if (r.ended || now - r.told > 100) {
      tell({ what: 'steps', step: luna.step, losses: r.losses, times: r.times, seconds: r.seconds });
      r.losses = [], r.times = [], r.told = now;
    }
    if (r.ended || now - r.shown > r.every) r.check = luna.validating(r.ended ? r.last : r.windows);
  }
  /* a batch of the validation, and after the last a sample */
  function check(r) {
    const { done, value } = r.check.next();
    if (!done) return;
    tell({ what: 'validation', step: luna.step, seconds: r.seconds, loss: value });
    if (r.prompt) tell({ what: 'sample', step: luna.step, bytes: luna.sample(r.prompt, 240, 0.8) });
    r.check = null, r.shown = performance.now();
  }

  const calls = {
    async open({ module }) { luna = await Luna.open(module); return {}; },
    text({ bytes }) { luna.text(bytes); return {}; },
    model({ settings }) { luna.model(settings); return { parameters: luna.parameters, step: luna.step }; },
    start(options) {
      run = Object.assign({ losses: [], times: [], seconds: 0, told: 0, shown: -1e9 }, options);
      port2.postMessage(0);
      return {};
    },
    change(options) { if (run) Object.assign(run, options); return {}; },
    stop() { run = null; return { step: luna.step }; },
    look({ bytes, layer }) { return luna.look(bytes, layer); },
    sample({ bytes, count, temperature }) { return { bytes: luna.sample(bytes, count, temperature) }; },
    save() { const bytes = luna.save(); return { bytes, step: luna.step }; },
    load({ bytes }) {
      luna.load(bytes);
      return { settings: luna.settings, step: luna.step, parameters: luna.parameters };
    },
    time({ n, l }) { return { times: luna.time(n, l) }; },
    equations({ x, p }) { return luna.equations(x, p); },
    learn({ signal, labels, steps }) {
      const told = (step, loss) => { if (step % 10 === 0) tell({ what: 'learnt', step, loss }); };
      return { loss: luna.detectorLearn(signal, labels, steps, told) };
    },
    read({ signal }) { return { found: luna.detectorRead(signal), state: luna.exports.page_detector_state() }; },
  };
  scope.onmessage = async ({ data }) => {
    try {
      tell(Object.assign({ id: data.id }, await calls[data.call](data)));
    } catch (error) {
      tell({ id: data.id, error: error.message });
    }
  };
}
if (typeof WorkerGlobalScope !== 'undefined') serve(self);
