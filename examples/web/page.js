/* page.js: what the page shows and asks. All computing is done by workers, which engine.js is the source of; what is
   here draws, and never for long. */
'use strict';
const $ = (id) => document.getElementById(id);
const encode = (text) => new TextEncoder().encode(text);
const number = (value, digits) =>
  value.toLocaleString('en', { maximumFractionDigits: digits, minimumFractionDigits: digits });
const whole = (value) => Math.round(value).toLocaleString('en');
function say(id, text, bad) {
  $(id).textContent = text;
  $(id).classList.toggle('bad', !!bad);
}
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();

/* ---- workers ----------------------------------------------------------------------------------------------------- */

/* i8x16.splat(0) as a whole module */
const simd = () => WebAssembly.validate(new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0,
  10, 8, 1, 6, 0, 65, 0, 253, 15, 11]));

async function unpacked(id) { /* the bytes of a file that the page has in it */
  const text = atob($(id).textContent.trim()), packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'))).arrayBuffer();
}

class Helper {
  constructor(module, hear) {
    this.waiting = new Map();
    this.next = 1;
    this.url = URL.createObjectURL(new Blob([$('engine').textContent], { type: 'text/javascript' }));
    this.worker = new Worker(this.url);
    this.worker.onmessage = ({ data }) => {
      const asked = this.waiting.get(data.id);
      if (!asked) return hear && hear(data);
      this.waiting.delete(data.id);
      if (data.error !== undefined) asked.fail(new Error(data.error));
      else asked.done(data);
    };
    this.worker.onerror = (event) => {
      const why = new Error(event.message || 'The worker could not be started.');
      for (const asked of this.waiting.values()) asked.fail(why);
      this.waiting.clear();
    };
    this.ready = this.ask('open', { module });
  }
  ask(call, what, list) {
    const id = this.next++;
    return new Promise((done, fail) => {
      this.waiting.set(id, { done, fail });
      this.worker.postMessage(Object.assign({ id, call }, what), list || []);
    });
  }
  close() {
    this.worker.terminate();
    URL.revokeObjectURL(this.url);
  }
}

/* ---- drawing ----------------------------------------------------------------------------------------------------- */

/* The canvas, cleared, in units of CSS pixels: { c, width, height } */
function sheet(canvas, height) {
  const width = canvas.clientWidth, tall = height || canvas.clientHeight, ratio = window.devicePixelRatio || 1;
  if (height && canvas.style.height !== height + 'px') canvas.style.height = height + 'px';
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(tall * ratio)) canvas.height = Math.round(tall * ratio);
  const c = canvas.getContext('2d');
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, width, tall);
  c.font = '12px system-ui, sans-serif';
  c.lineJoin = 'round';
  return { c, width, height: tall };
}
const drawings = new Map();
let drawn = false;
/* Draws at the next frame; several wishes are one. */
function redraw(...names) {
  names.forEach((name) => wanted.add(name));
  if (!drawn) drawn = true, requestAnimationFrame(() => {
    drawn = false;
    const now = [...wanted];
    wanted.clear();
    now.forEach((name) => drawings.get(name)());
  });
}
const wanted = new Set();

/* round numbers from low to high, at most `most` */
function ticks(low, high, most) {
  const rough = Math.max(high - low, 1e-9) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough), out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + 1e-9; v += step) out.push(+v.toPrecision(10));
  return out;
}
/* A frame with its axes; returns the two maps of values to pixels. x and y: { low, high, ticks, log, name } */
function axes({ c, width, height }, x, y) {
  const box = { left: 52, right: width - 12, top: 24, bottom: height - 38 };
  const along = (axis, from, to) => (v) => {
    const scale = axis.log ? Math.log : (number) => number, low = scale(axis.low);
    return from + (scale(v) - low) / (scale(axis.high) - low) * (to - from);
  };
  const px = along(x, box.left, box.right), py = along(y, box.bottom, box.top);
  c.strokeStyle = style('line'), c.fillStyle = style('soft'), c.lineWidth = 1;
  c.textAlign = 'center';
  for (const v of x.ticks) {
    c.beginPath(), c.moveTo(px(v), box.top), c.lineTo(px(v), box.bottom), c.stroke();
    c.fillText((x.text || String)(v), px(v), box.bottom + 16);
  }
  c.fillText(x.name, (box.left + box.right) / 2, height - 6);
  c.textAlign = 'right';
  for (const v of y.ticks) {
    c.beginPath(), c.moveTo(box.left, py(v)), c.lineTo(box.right, py(v)), c.stroke();
    c.fillText((y.text || String)(v), box.left - 6, py(v) + 4);
  }
  c.textAlign = 'left';
  c.fillText(y.name, 6, 14);
  return { px, py, box };
}
function polyline(c, points, colour, width, alpha) {
  c.strokeStyle = colour, c.lineWidth = width, c.globalAlpha = alpha || 1;
  c.beginPath();
  points.forEach(([x, y], i) => (i ? c.lineTo(x, y) : c.moveTo(x, y)));
  c.stroke();
  c.globalAlpha = 1;
}

/* ---- 1: see it --------------------------------------------------------------------------------------------------- */

/* The picture as SVG text: softmax attention's n n products beside Luna's 2 l n, or above them. `alone`: for a file,
   with the colours that the page's style sheet gives it here. */
function picture(n, l, { stacked = false, alone = false } = {}) {
  const place = (i, count, [left, right]) => +(left + (right - left) * (count > 1 ? i / (count - 1) : 0.5)).toFixed(1);
  const dots = (count, along, y, kind) => `<g class="${kind}">` + Array.from({ length: count }, (unused, i) =>
    `<circle cx="${place(i, count, along)}" cy="${y}" r="3.5"/>`).join('') + '</g>';
  const lines = (count, from, y, below, to, until, kind) => {
    let path = '';
    for (let i = 0; i < count; i++)
      for (let j = 0; j < below; j++) path += `M${place(i, count, from)} ${y}L${place(j, below, to)} ${until}`;
    return `<path class="${kind}" d="${path}"/>`;
  };
  const text = (x, y, words, anchor) => `<text x="${x}" y="${y}" text-anchor="${anchor || 'middle'}">${words}</text>`;
  const wide = [30, 380], narrow = [205 - 9 * l, 205 + 9 * l];
  const light = { x: '#1f5fa8', p: '#a34f00', yp: '#14693f' }, dark = { x: '#8abdf7', p: '#f0a661', yp: '#74d1a2' };
  const rules = (colours) => Object.entries(colours).map(([kind, colour]) =>
    `g.${kind}{fill:${colour}}path.${kind}{stroke:${colour}}`).join('');
  const own = '<style>text{font:15px sans-serif;fill:#55585d}path{fill:none;stroke-width:.6;stroke-opacity:.5}' +
    `${rules(light)}@media(prefers-color-scheme:dark){text{fill:#a9adb3}${rules(dark)}}</style>`;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${stacked ? '410 660' : '820 330'}" role="img" ` +
    `aria-label="Softmax attention: ${n} tokens times ${n} tokens are ${n * n} lines. Luna: ${l} slots, ${2 * l * n} ` +
    `lines.">${alone ? own : ''}` +
    text(205, 22, 'softmax attention') + lines(n, wide, 50, n, wide, 270, 'x') +
    dots(n, wide, 50, 'x') + dots(n, wide, 270, 'x') + text(205, 310, `n n = ${n} × ${n} = ${whole(n * n)} products`) +
    `<g transform="translate(${stacked ? '0 330' : '410 0'})">` +
    text(205, 22, 'Luna') + lines(n, wide, 50, l, narrow, 160, 'p') + lines(l, narrow, 160, n, wide, 270, 'yp') +
    dots(n, wide, 50, 'x') + dots(l, narrow, 160, 'p') + dots(n, wide, 270, 'x') +
    text(388, 115, 'pack', 'end') + text(388, 213, 'unpack', 'end') +
    text(205, 310, `2 l n = 2 × ${l} × ${n} = ${whole(2 * l * n)} products`) + '</g></svg>';
}
function see() {
  const n = +$('n').value, l = +$('l').value;
  $('n-is').textContent = n, $('l-is').textContent = l;
  $('picture').innerHTML = picture(n, l, { stacked: $('picture').clientWidth < 560 });
  $('counts').textContent = `With 100,000 tokens and ${l} slots: ${whole(1e10)} products and ${whole(2e5 * l)}.`;
}

const lengths = [256, 512, 1024, 2048, 4096, 8192, 16384];
let times = [];
drawings.set('times', () => {
  const s = sheet($('times')), all = times.flatMap((row) => row.slice(1)).filter((v) => v > 0);
  const low = 10 ** Math.floor(Math.log10(Math.min(0.1, ...all)));
  const high = 10 ** Math.ceil(Math.log10(Math.max(100, ...all)));
  const powers = [];
  for (let v = low; v <= high * 1.01; v *= 10) powers.push(+v.toPrecision(1));
  const narrow = s.width < 420;
  const across = lengths.filter((n, i) => !narrow || i % 2 === 0);
  const { px, py } = axes(s, { low: 200, high: 20000, log: true, ticks: across, text: whole, name: 'tokens' },
                          { low, high, log: true, ticks: powers, text: (v) => (v < 1 ? v : whole(v)),
                            name: 'milliseconds' });
  [['x', 1, 'softmax'], ['p', 2, 'Luna']].forEach(([colour, column, name]) => {
    const points = times.map((row) => [px(row[0]), py(row[column])]);
    polyline(s.c, points, style(colour), 2);
    s.c.fillStyle = style(colour);
    points.forEach(([x, y]) => { s.c.beginPath(), s.c.arc(x, y, 3.5, 0, 7), s.c.fill(); });
    if (points.length) s.c.textAlign = 'right', s.c.fillText(name, points.at(-1)[0] - 4, points.at(-1)[1] - 9);
  });
});
/* Empty rows stand ready, so that nothing moves when they are filled. */
function clearTimes() {
  times = [];
  $('time-rows').innerHTML = lengths.map((n) => `<tr><td>${whole(n)}<td>–<td>–<td>–`).join('');
  redraw('times');
}
async function measure(module) {
  const helper = new Helper(module);
  $('measure').disabled = true;
  clearTimes();
  try {
    await helper.ready;
    for (const [i, n] of lengths.entries()) {
      say('time-says', `Measuring ${whole(n)} tokens.` +
        (lm.running ? ' Training goes on beside it, and makes it slower.' : ''));
      const [softmax, luna] = (await helper.ask('time', { n, l: +$('time-l').value })).times;
      times.push([n, softmax, luna]);
      [softmax, luna, softmax / luna].forEach((v, j) => {
        $('time-rows').rows[i].cells[j + 1].textContent = number(v, v < 10 ? 2 : v < 100 ? 1 : 0);
      });
      redraw('times');
    }
    const [n, softmax, luna] = times.at(-1);
    say('time-says', `For ${whole(n)} tokens Luna's attention takes ${number(luna, 1)} ms, softmax attention ` +
      `${number(softmax, 0)} ms.`);
    $('times').setAttribute('aria-label', 'Time by length: ' + times.map(([a, b, c]) =>
      `${a} tokens, softmax ${b.toFixed(2)} ms, Luna ${c.toFixed(2)} ms`).join('; '));
  } catch (error) { say('time-says', error.message, true); }
  helper.close();
  $('measure').disabled = false;
}

/* ---- 2: follow the equations ------------------------------------------------------------------------------------- */

const given = { x: [1, 0.5, -0.5, 0.8, 0.2, -0.9, -1, 0.4, 0.6, -0.6, -1.2, 1], p: [1.5, 0, -1, -1, 0.5, 1] };
const shapes = { x: [4, 3], p: [2, 3], pack: [2, 4], yp: [2, 3], unpack: [4, 2], yx: [4, 3], xa: [4, 3], nextp: [2, 3],
  nextx: [4, 3], z: [4, 2], sum: [3, 2], f: [4, 2] };
const shown = [
  ['given', 'x', 'x', 'X, the tokens [4, 3]'], ['given', 'p', 'p', 'P, the slots [2, 3]'],
  ['eq3', 'pack', 'p', 'softmax(P Xᵀ / √d) [2, 4]'], ['eq3', 'yp', 'yp', 'Y_P [2, 3]'],
  ['eq4', 'unpack', 'x', 'softmax(X Y_Pᵀ / √d) [4, 2]'], ['eq4', 'yx', 'yx', 'Y_X [4, 3]'],
  ['eq6', 'xa', 'x', 'X_A [4, 3]'], ['eq6', 'nextp', 'p', 'P′ [2, 3]'], ['eq6', 'nextx', 'x', 'X′ [4, 3]'],
  ['eq7', 'z', 'yp', 'Z [4, 2]'], ['eq7', 'sum', 'p', 'the sum at t [3, 2]'], ['eq7', 'f', 'yx', 'F [4, 2]']];
let values = null, asking = false, changed = false;

const decimals = (v) => (v < 0 ? '−' : '') + Math.abs(v).toFixed(2);
function writeNumber(cell, name, i) {
  cell.textContent = decimals(given[name][i]);
  cell.setAttribute('aria-valuenow', given[name][i].toFixed(2));
}
function draggable(cell, name, i, label) {
  const set = (v) => {
    given[name][i] = Math.round(Math.min(3, Math.max(-3, v)) * 100) / 100;
    writeNumber(cell, name, i);
    follow();
  };
  Object.entries({ role: 'slider', tabindex: 0, 'aria-valuemin': -3, 'aria-valuemax': 3, 'aria-label': label })
    .forEach(([key, value]) => cell.setAttribute(key, value));
  writeNumber(cell, name, i);
  let from = null;
  cell.addEventListener('pointerdown', (event) => {
    from = { x: event.clientX, value: given[name][i] };
    cell.setPointerCapture(event.pointerId);
  });
  cell.addEventListener('pointermove', (event) => { if (from) set(from.value + (event.clientX - from.x) / 50); });
  cell.addEventListener('pointerup', () => { from = null; });
  cell.addEventListener('pointercancel', () => { from = null; });
  cell.addEventListener('keydown', (event) => {
    const by = { ArrowUp: 0.1, ArrowRight: 0.1, ArrowDown: -0.1, ArrowLeft: -0.1, PageUp: 1, PageDown: -1 }[event.key];
    if (event.key === 'Home') set(0);
    else if (by) set(given[name][i] + by);
    else return;
    event.preventDefault();
  });
}
function makeMatrices() {
  for (const [where, name, colour, title] of shown) {
    const [rows, columns] = shapes[name], table = document.createElement('table');
    const subscripts = title.replace(/_(.)/g, '<sub>$1</sub>').replace('ᵀ', '<sup>T</sup>');
    table.className = 'matrix ' + colour, table.id = 'm-' + name;
    table.innerHTML = `<caption>${subscripts}</caption>` + `<tr>${'<td><span></span>'.repeat(columns)}`.repeat(rows);
    $(where).append(table);
    if (given[name]) [...table.querySelectorAll('span')].forEach((cell, i) => draggable(cell, name, i,
      `${name.toUpperCase()}, row ${Math.floor(i / columns) + 1}, column ${i % columns + 1}`));
  }
}
function showValues() {
  const t = +$('t').value;
  $('t-is').textContent = t;
  if (!values) return;
  for (const [, name, colour] of shown) {
    if (given[name]) continue;
    const list = name === 'sum' ? values.sums.slice(6 * (t - 1), 6 * t) : values[name];
    const tint = (v) => `color-mix(in srgb, var(--${colour}) ${Math.round(v * 45)}%, transparent)`;
    [...$('m-' + name).querySelectorAll('span')].forEach((cell, i) => {
      cell.textContent = decimals(list[i]);
      if (name === 'pack' || name === 'unpack') cell.style.background = tint(list[i]);
    });
  }
  ['z', 'f'].forEach((name) => [...$('m-' + name).rows].forEach((row, i) =>
    row.classList.toggle('now', name === 'f' ? i === t - 1 : i < t)));
}
/* One question at a time; what has changed meanwhile is asked next. */
async function follow() {
  changed = true;
  if (asking || !tools) return;
  asking = true;
  try {
    while (changed) changed = false, values = await tools.ask('equations', given), showValues();
    say('follow-says', '');
  } catch (error) { say('follow-says', error.message, true); }
  asking = false;
}

/* ---- 3: train it ------------------------------------------------------------------------------------------------- */

const lm = { running: false, step: 0, text: null, sent: null, started: false };
let tools = null, trainer = null, other = null, compiled = null;
const curves = { luna: [], other: [], held: [], otherHeld: [] };
const most = 1500;                   /* points of a curve; when there are more, pairs become one */
const read = (id) => {
  const box = $(id), value = +box.value;
  if (!box.checkValidity() && !(value >= +box.min && value <= +box.max))
    throw new Error(`${box.parentElement.firstChild.textContent.trim()} must be from ${box.min} to ${box.max}.`);
  return value;
};
const settings = () => Object.assign(Object.fromEntries(['layers', 'dim', 'memory', 'window', 'batch'].map((name) =>
  [name, Math.round(read(name))])), { heads: 4, softmax: 0, seed: 1 });
const speed = () => ({ lr: read('lr'), steps: Math.round(read('steps')) });

function curveAdd(name, step, seconds, loss) {
  const list = curves[name];
  list.push([step, seconds, loss]);
  if (list.length > most)
    curves[name] = list.filter((unused, i) => i % 2).map((b, i) => b.map((v, k) => (v + list[2 * i][k]) / 2));
}
const smoothed = (list) => {
  let mean = 0;
  return list.map(([step, seconds, loss], i) => [step, seconds, mean += (loss - mean) / Math.min(i + 1, 20)]);
};
drawings.set('loss', () => {
  const s = sheet($('loss')), column = $('by').value === 'step' ? 0 : 1, everything = Object.values(curves).flat();
  const losses = everything.map((point) => point[2]);
  const last = Math.max(column ? 10 : 50, ...everything.map((point) => point[column]));
  const low = Math.floor(Math.min(5, ...losses) * 2) / 2, high = Math.max(6, ...losses);
  const { px, py } = axes(s, { low: 0, high: last, ticks: ticks(0, last, s.width < 420 ? 5 : 10),
                              name: column ? 'seconds of training' : 'steps' },
                          { low, high, ticks: ticks(low, high, 6), name: 'nats a byte' });
  const both = [['x', 'other', 'otherHeld', 'softmax'], ['p', 'luna', 'held', 'Luna']];
  both.forEach(([colour, name, held, label], row) => {
    const at = (point) => [px(point[column]), py(point[2])];
    if (!curves[name].length) return;
    polyline(s.c, curves[name].map(at), style(colour), 1, 0.35);
    polyline(s.c, smoothed(curves[name]).map(at), style(colour), 2.2);
    s.c.fillStyle = style(colour);
    curves[held].map(at).forEach(([x, y]) => { s.c.beginPath(), s.c.arc(x, y, 3, 0, 7), s.c.fill(); });
    s.c.textAlign = 'right', s.c.fillText(label, s.width - 16, 38 + 16 * row);
  });
});

const printable = (bytes) => new TextDecoder().decode(bytes).replace(/[\u0000-\u0008\u000b-\u001f\u007f\ufffd]/g, '·');
const clock = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, '0')}`;

/* what a worker in training tells; `mine` is the softmax model's? */
function heard(data, isOther) {
  const base = isOther ? lm.otherBase : lm.base, curve = isOther ? 'other' : 'luna';
  if (data.what === 'steps') {
    const count = data.losses.length, bytes = lm.perStep * (data.step - base.step) / data.seconds;
    data.losses.forEach((loss, i) =>
      curveAdd(curve, data.step - count + 1 + i, base.seconds + data.times[i], loss));
    const mean = smoothed(curves[curve]).at(-1)[2];
    $(isOther ? 'f-other' : 'f-loss').textContent = mean.toFixed(3);
    $(isOther ? 'f-other-rate' : 'f-rate').textContent = whole(bytes);
    if (!isOther) {
      lm.step = data.step, lm.seconds = base.seconds + data.seconds;
      $('f-step').textContent = whole(data.step);
      const left = Math.max(0, +$('steps').value - data.step);
      $('f-left').textContent = clock(left * data.seconds / (data.step - base.step));
      $('loss').setAttribute('aria-label', `The loss at step ${data.step} is ${mean.toFixed(2)} nats a byte`);
    } else lm.otherSeconds = base.seconds + data.seconds, lm.otherStep = data.step;
    redraw('loss');
  } else if (data.what === 'validation') {
    curves[isOther ? 'otherHeld' : 'held'].push([data.step, base.seconds + data.seconds, data.loss]);
    if (!isOther) $('f-held').textContent = data.loss.toFixed(3);
    redraw('loss');
    if (!isOther) peek();
  } else if (data.what === 'sample' && !isOther) $('sample').textContent = lm.promptText + printable(data.bytes);
  else if (data.what === 'ended') ended(isOther, 'All steps are made. Raise Steps in all and press Continue for more.');
  else if (data.what === 'failed')
    ended(isOther, `${data.error} Training stopped at step ${data.step}; nothing learnt is lost.`, true);
}
function ended(isOther, text, bad) {
  if (isOther) {
    lm.otherRunning = false;
    if (bad) say('train-says', 'The softmax model: ' + text, true);
    return;
  }
  lm.running = false;
  $('go').textContent = 'Continue';
  say('train-says', text, bad);
}

const limit = 64e6, visible = 10000;
const tooLarge = (what, size, unit) => `${what} has ${whole(size)} ${unit}, which is too much for a page. ` +
  'The text from before is kept.';
/* The text to learn, of which the box shows the beginning. */
function setText(text, what) {
  if (text.length > limit)
    return say('text-says', tooLarge(what, text.length, 'characters'), true);
  lm.text = text, lm.cut = text.length > visible;
  $('text').value = lm.cut ? text.slice(0, visible) : text;
  $('text').readOnly = lm.cut;
  say('text-says', `${what}: ${whole(text.length)} characters.` +
    (lm.cut ? ` The box shows the first ${whole(visible)}; all are learnt.` : ''));
}
async function setFile(file) {
  if (file.size > limit)
    return say('text-says', tooLarge(file.name, file.size, 'bytes'), true);
  setText(new TextDecoder().decode(await file.arrayBuffer()), file.name);
}
async function start() {
  const options = speed(), bytes = encode(lm.text);
  if (lm.sent !== lm.text) {
    await trainer.ask('text', { bytes });
    lm.sent = lm.text;
  }
  const held = bytes.slice(bytes.length - Math.floor(bytes.length / 10)), line = held.indexOf(10) + 1;
  lm.promptBytes = held.slice(line, line + 40);
  lm.promptText = printable(lm.promptBytes) + '┃';
  lm.perStep = lm.shape.batch * Math.min(lm.shape.window, bytes.length - held.length - 1);
  if ($('beside').checked) await startOther(bytes, options);
  lm.base = { step: lm.step, seconds: lm.seconds || 0 };
  await trainer.ask('start', Object.assign({ every: 5000, windows: 16, last: 1024, prompt: lm.shape.softmax ? null :
    lm.promptBytes }, options));
  lm.running = true;
  $('go').textContent = 'Stop', $('anew').disabled = false;
  say('train-says', 'The model is training. Its learning rate rises for a tenth of the steps, or 100, and then falls.');
}
/* The same, with softmax attention in Luna's place, in a worker of its own. */
async function startOther(bytes, options) {
  if (!other) {
    other = new Helper(compiled, (data) => heard(data, true));
    await other.ready;
    await other.ask('model', { settings: Object.assign({}, lm.shape, { softmax: 1 }) });
    lm.otherStep = 0, lm.otherSeconds = 0;
  }
  await other.ask('text', { bytes });
  lm.otherBase = { step: lm.otherStep, seconds: lm.otherSeconds };
  await other.ask('start', Object.assign({ every: 5000, windows: 16, last: 1024, prompt: null }, options));
  lm.otherRunning = true;
}
async function stopOther() {
  if (lm.otherRunning) lm.otherStep = (await other.ask('stop')).step;
  lm.otherRunning = false;
}
async function stop() {
  const { step } = await trainer.ask('stop');
  await stopOther();
  lm.running = false, lm.step = step;
  $('go').textContent = 'Continue';
  say('train-says', `The training is stopped at step ${whole(step)}. The model is kept.`);
}
/* A new model by the settings; where it fails the old one stays. */
async function anew() {
  const shape = settings();
  if (lm.running) await stop();
  const { parameters } = await trainer.ask('model', { settings: shape });
  forget(shape, parameters, 0);
}
function forget(shape, parameters, step) {
  if (other) other.close(), other = null;
  lm.otherRunning = false;
  Object.assign(lm, { shape, step, seconds: 0, made: true });
  for (const name of Object.keys(curves)) curves[name] = [];
  ['f-loss', 'f-held', 'f-rate', 'f-left', 'f-other', 'f-other-rate'].forEach((id) => { $(id).textContent = '–'; });
  $('f-step').textContent = whole(step), $('f-size').textContent = whole(parameters);
  $('sample').textContent = 'There is no sample yet.';
  $('go').textContent = step ? 'Continue' : 'Start', $('anew').disabled = !step;
  const before = $('layer').value;
  $('layer').innerHTML = Array.from({ length: shape.layers }, (unused, i) => `<option value="${i}">${i + 1}`).join('');
  $('layer').value = before && +before < shape.layers ? before : shape.layers - 1;
  redraw('loss');
  peek();
}
/* what a button does, with a sentence where it fails */
const guarded = (where, work) => async (...args) => {
  try { await work(...args); } catch (error) { say(where, error.message, true); }
};
const sameShape = (a, b) => ['layers', 'dim', 'memory', 'window', 'batch'].every((name) => a[name] === b[name]);

async function go() {
  if (lm.running) return stop();
  if (!lm.cut) lm.text = $('text').value;
  if (encode(lm.text.slice(0, 100)).length < 100)
    throw new Error('The text is too short. The page trains on nine tenths of it and validates on the rest, ' +
                    'for which 100 bytes are the least.');
  const wanted = settings();
  if (lm.step === 0 && !sameShape(wanted, lm.shape)) await anew();
  else if (!sameShape(wanted, lm.shape))
    throw new Error(`The model has other sizes than the boxes say (${lm.shape.layers} layers of ${lm.shape.dim}, ` +
      `${lm.shape.memory} slots, ${lm.shape.batch} windows of ${lm.shape.window}). Start over makes a new one.`);
  if (lm.step >= speed().steps)
    throw new Error(`The model has made ${whole(lm.step)} steps. Raise Steps in all to continue.`);
  return start();
}

/* ---- 4: look inside ---------------------------------------------------------------------------------------------- */

let inside = null, peeking = false, peekAgain = false;
async function peek() {
  peekAgain = true;
  if (peeking || !trainer || !lm.made) return;
  peeking = true;
  while (peekAgain) {
    peekAgain = false;
    const bytes = encode($('sentence').value).slice(0, 64);
    try {
      if (lm.shape.softmax) throw new Error('This model has softmax attention, so it has no memory to look at.');
      if (!bytes.length) throw new Error('There is no text to look at.');
      inside = Object.assign(await trainer.ask('look', { bytes, layer: +$('layer').value }), { bytes });
      const keys = 8 * lm.shape.dim * lm.shape.layers;
      say('inside-says', `After ${bytes.length} bytes, as after a million, all that the model keeps of them is ` +
        `${whole(inside.state)} bytes. Softmax attention would keep ${whole(keys)} for each byte read: ` +
        `${whole(keys * bytes.length)} so far.`);
    } catch (error) {
      inside = null;
      say('inside-says', error.message, true);
    }
    redraw('maps');
  }
  peeking = false;
}
/* of a slot's share in a pack, and a slot's among slots in an unpack: how many times an even share */
function strengths(map) {
  const { heads, n, slots } = map, pack = map.pack.slice(), unpack = map.unpack.map((v) => v * slots);
  for (let h = 0; h < heads; h++)
    for (let s = 0; s < slots; s++) {
      let sum = 0;
      for (let t = 0; t < n; t++) sum += map.pack[(h * n + t) * slots + s];
      for (let t = 0; t < n; t++) {
        const i = (h * n + t) * slots + s;
        pack[i] *= n / sum;
      }
    }
  return [pack, unpack];
}
let layout = null;
drawings.set('maps', () => {
  const canvas = $('maps'), wide = canvas.clientWidth > 640, { heads, slots } = inside || { heads: 4, slots: 16 };
  const rowHeight = slots > 24 ? 3 : 6, tall = slots * rowHeight, step = tall + 26, column = 30 + heads * step;
  const s = sheet(canvas, wide ? column : 2 * column), { c } = s;
  const room = wide ? s.width / 2 - 12 : s.width, n = inside ? inside.n : 1, cell = Math.min(16, (room - 34) / n);
  layout = { cell, rowHeight, tall, step, column, wide, room, maps: inside ? strengths(inside) : [] };
  if (!inside) return;
  const blue = style('x'), brown = style('low'), soft = style('soft');
  layout.maps.forEach((map, which) => {
    const left = 26 + (wide && which ? s.width / 2 + 6 : 0), top = !wide && which ? column : 0;
    c.fillStyle = soft, c.textAlign = 'left', c.font = '13px system-ui, sans-serif';
    c.fillText(which ? 'unpack: which slots a character reads' : 'pack: where a slot looks', left, top + 15);
    for (let h = 0; h < heads; h++) {
      const y = top + 36 + h * step;
      c.font = Math.min(12, Math.max(7, cell * 1.5)) + 'px ui-monospace, monospace';
      c.textAlign = 'center', c.fillStyle = soft;
      for (let t = 0; t < n; t++) {
        const byte = inside.bytes[t], name = byte > 32 && byte < 127 ? String.fromCharCode(byte) : '·';
        c.fillText(byte === 32 ? '␣' : name, left + (t + 0.5) * cell, y - 4);
      }
      c.font = '12px system-ui, sans-serif';
      c.fillText(String(h + 1), left - 14, y + tall / 2 + 4);
      for (let t = 0; t < n; t++)
        for (let k = 0; k < slots; k++) {
          const octaves = Math.log2(Math.max(map[(h * n + t) * slots + k], 1e-9)) / (which ? 1 : 3);
          const strength = Math.max(-1, Math.min(1, octaves));
          c.fillStyle = strength > 0 ? blue : brown, c.globalAlpha = Math.abs(strength);
          c.fillRect(left + t * cell, y + k * rowHeight, cell + 0.3, rowHeight + 0.3);
        }
      c.globalAlpha = 1, c.strokeStyle = style('line'), c.lineWidth = 1;
      c.strokeRect(left, y, n * cell, tall);
    }
  });
  canvas.setAttribute('aria-label', `Heat maps of pack and unpack of layer ${+$('layer').value + 1}: ${heads} heads, ` +
    `${slots} slots, ${n} characters`);
});
function readCell(event) {
  if (!inside || !layout || !layout.maps.length) return;
  const box = $('maps').getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const which = layout.wide ? +(x > box.width / 2) : +(y > layout.column);
  const left = 26 + (layout.wide && which ? box.width / 2 + 6 : 0);
  const top = 36 + (!layout.wide && which ? layout.column : 0);
  const h = Math.floor((y - top) / layout.step), t = Math.floor((x - left) / layout.cell);
  const k = Math.floor((y - top - h * layout.step) / layout.rowHeight);
  const inBox = h >= 0 && h < inside.heads && t >= 0 && t < inside.n && k >= 0 && k < inside.slots;
  $('cell').textContent = !inBox ? 'Point at a cell to read it.' :
    `Head ${h + 1}, slot ${k + 1}, character ${t + 1} (${printable(inside.bytes.slice(t, t + 1))}): ` +
    `${layout.maps[which][(h * inside.n + t) * inside.slots + k].toFixed(2)} times an even share.`;
}

/* ---- 5: take it along -------------------------------------------------------------------------------------------- */

async function save() {
  const { bytes, step } = await trainer.ask('save'), link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([bytes], { type: 'application/octet-stream' }));
  link.download = 'luna.safetensors';
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  say('take-says', `luna.safetensors has ${whole(bytes.length)} bytes. It is the training at step ${whole(step)}.`);
}
async function load(file) {
  if (file.size > 1e9) throw new Error(tooLarge(file.name, file.size, 'bytes'));
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (lm.running) await stop();
  let got;
  try { got = await trainer.ask('load', { bytes }, [bytes.buffer]); } catch (error) {
    throw new Error(`${file.name} is no checkpoint that this page can resume; the model is as it was. (luna.h: ` +
      `${error.message})`);
  }
  ['layers', 'dim', 'memory', 'window', 'batch'].forEach((name) => { $(name).value = got.settings[name]; });
  forget(got.settings, got.parameters, got.step);
  say('take-says', `${file.name}: a model of ${got.settings.layers} layers of ${got.settings.dim}, at step ` +
    `${whole(got.step)}. Continue, in part 3, trains it further.`);
  say('train-says', `The model is now that of ${file.name}.`);
}
/* The bundled model, in 8 bits: examples/models/english.safetensors. */
async function takeEnglish() {
  await load(new File([await unpacked('english-file')], 'english.safetensors'));
  const prompt = encode('The king'), wanted = { bytes: prompt, count: 400, temperature: 0.6 };
  const { bytes } = await trainer.ask('sample', wanted);
  $('sample').textContent = `${printable(prompt)}┃${printable(bytes)}`;
  say('take-says', 'The bundled model of English is loaded. It has 2 layers of 40 and has read Shakespeare\'s plays. ' +
    'Its sample is in part 3, and part 4 looks inside it. Start, in part 3, trains it on your text.');
}
function dropZone(zone, take) {
  ['dragenter', 'dragover'].forEach((kind) => $(zone).addEventListener(kind, (event) => {
    event.preventDefault();
    $(zone).classList.add('over');
  }));
  ['dragleave', 'drop'].forEach((kind) => $(zone).addEventListener(kind, () => $(zone).classList.remove('over')));
  $(zone).addEventListener('drop', (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  });
}

/* ---- 6: streams -------------------------------------------------------------------------------------------------- */

const length = 512, perSecond = 60;
const signal = { values: new Float32Array(length), found: new Float32Array(length), truth: new Uint8Array(length),
  at: 0, until: 120, kind: 0, state: 0, marks: [[0, 0], [0, 0]], running: false, learnt: false, hand: null, drag: null,
  seen: 0, right: 0, wrong: 0 };
let chance = 12345;
const random = () => { /* the same demo at each opening */
  chance = (Math.imul(chance, 1664525) + 1013904223) >>> 0;
  return chance / 4294967296;
};
const pulse = (u, at) => Math.exp(-(((u - at) / 3) ** 2));
/* The next number of the demo wave: slow waves, noise, and now and then a double pulse (kind 1) or a single one (2). */
function demo() {
  const t = signal.at++;
  let value = 0.25 * Math.sin(t / 17) + 0.15 * Math.sin(t / 7.3 + 1) + 0.04 * (random() + random() - 1);
  const u = t - signal.until;
  if (u >= 0 && signal.kind === 0) signal.kind = signal.next || (random() < 0.5 ? 1 : 2), signal.next = 0;
  if (signal.kind) value += 0.8 * pulse(u, 8) - (signal.kind === 1 ? 0.8 * pulse(u, 18) : 0);
  const inside = signal.kind === 1 && u >= 0 && u < 28 ? 1 : 0;
  if (signal.kind && u >= 32) signal.kind = 0, signal.until = t + 40 + Math.floor(random() * 90);
  return [value, inside];
}
function push(value, truth, found) {
  for (const [list, v] of [[signal.values, value], [signal.truth, truth], [signal.found, found]]) {
    list.copyWithin(0, 1);
    list[length - 1] = v;
  }
}
function firstSignal() {
  const kinds = [1, 2, 1, 2, 2];
  for (let i = 0; i < length; i++) {
    if (signal.kind === 0 && kinds.length && i === signal.until) signal.next = kinds.shift(), signal.until = i;
    if (signal.kind === 0 && !kinds.length && i >= signal.until) signal.until = i + 30;
    if (i === 60) signal.until = 60;
    const [value, truth] = demo();
    push(value, truth, 0);
  }
  const runs = [];
  signal.truth.forEach((v, i) => { if (v && !signal.truth[i - 1]) runs.push([i, i]); if (v) runs.at(-1)[1] = i; });
  signal.marks = [runs[0] || [0, 27], runs[1] || [100, 127]];
  writeMarks();
}
function writeMarks() {
  signal.marks.forEach(([from, to], i) => { $('from' + i).value = from, $('to' + i).value = to; });
}
drawings.set('signal', () => {
  const s = sheet($('signal')), { c, width, height } = s, px = (i) => i / (length - 1) * width, line = height - 40;
  const py = (v) => line / 2 - v * line / 3.2;
  const band = (from, to, colour) => {
    c.fillStyle = style(colour), c.globalAlpha = 0.22;
    c.fillRect(px(from), 0, Math.max(2, px(to) - px(from)), line);
    c.globalAlpha = 1;
  };
  if (!signal.running) signal.marks.forEach(([from, to]) => band(from, to, 'p'));
  if (signal.drag) band(Math.min(...signal.drag), Math.max(...signal.drag), 'p');
  for (let i = 0, from = -1; i <= length; i++) {
    const yes = i < length && signal.found[i] > 0.5;
    if (yes && from < 0) from = i;
    if (!yes && from >= 0) band(from, i, 'found'), from = -1;
  }
  polyline(c, Array.from(signal.values, (v, i) => [px(i), py(v)]), style('ink'), 1.4);
  c.strokeStyle = style('line');
  c.beginPath(), c.moveTo(0, line), c.lineTo(width, line), c.stroke();
  polyline(c, Array.from(signal.found, (v, i) => [px(i), height - 4 - 30 * v]), style('found'), 1.6);
});
async function learn() {
  const marks = signal.marks.map(([a, b]) => [Math.min(a, b), Math.max(a, b)]), labels = new Int32Array(length);
  if (marks.some(([a, b]) => b - a < 6 || b - a > 120))
    throw new Error('An example has 6 to 120 numbers. Mark both again.');
  if (signal.running) await play();
  /* A yes is due when most of the example has been seen; before that, and just after it, either is right. */
  for (const [a, b] of marks) {
    labels.fill(-1, a, Math.min(length, b + 8));
    labels.fill(1, Math.round(a + 0.7 * (b - a)), Math.min(length, b + 1));
  }
  ['learn', 'play'].forEach((id) => { $(id).disabled = true; });
  const steps = 200, copy = signal.values.slice();
  tools.hear = (data) =>
    say('stream-says', `The detector is training: step ${data.step} of ${steps}, loss ${data.loss.toFixed(3)}.`);
  try {
    await tools.ask('learn', { signal: copy, labels, steps });
    const { found, state } = await tools.ask('read', { signal: copy });
    signal.found.set(found);
    signal.learnt = true, signal.seen = signal.right = signal.wrong = 0;
    say('stream-says',
      `The detector is trained. It keeps ${whole(state)} bytes of the past, and the last 64 numbers. Press Run.`);
  } finally { ['learn', 'play'].forEach((id) => { $(id).disabled = false; }); }
  redraw('signal');
}
/* What is found in the demo wave, against what it has: a pulse counts when its end leaves the last 40 numbers. */
function count() {
  const i = length - 40;
  if (signal.truth[i] && !signal.truth[i + 1]) {
    signal.seen++;
    if (signal.found.subarray(i - 27, i + 16).some((v) => v > 0.5)) signal.right++;
  }
  const begins = signal.found[i] > 0.5 && !(signal.found[i - 1] > 0.5);
  if (begins && !signal.truth.subarray(i - 12, i + 12).some((v) => v)) signal.wrong++;
}
async function play() {
  signal.running = !signal.running;
  $('play').textContent = signal.running ? 'Stop' : 'Run';
  if (!signal.running) {
    signal.marks = [[0, 0], [0, 0]], writeMarks();
    say('stream-says', 'The signal is stopped. Drag over it to mark two examples, all that it has, and train ' +
      'on them, or press Run.');
    return redraw('signal');
  }
  let last = performance.now(), due = 0;
  while (signal.running) {
    const now = await new Promise(requestAnimationFrame);
    due = Math.max(0, Math.min(30, due + (now - last) * perSecond / 1000)), last = now;
    const fresh = Math.floor(due), values = new Float32Array(fresh), truths = [];
    if (!fresh) continue;
    due -= fresh;
    for (let i = 0; i < fresh; i++) {
      const [value, truth] = demo();
      values[i] = signal.hand === null ? value : signal.hand, truths.push(signal.hand === null ? truth : 0);
    }
    try {
      const found = signal.learnt ? (await tools.ask('read', { signal: values })).found : new Float32Array(fresh);
      for (let i = 0; i < fresh; i++) push(values[i], truths[i], found[i]), count();
    } catch (error) {
      signal.running = false, $('play').textContent = 'Run';
      say('stream-says', error.message, true);
    }
    if (signal.running && signal.learnt)
      say('stream-says', `It runs at ${perSecond} numbers a second. Of ${signal.seen} double pulses of the demo wave ` +
        `${signal.right} were found, and ${signal.wrong} times there was none where it said yes.`);
    else if (signal.running)
      say('stream-says', 'The signal runs, but the detector is not trained yet. Stop it, mark two examples and train.');
    redraw('signal');
  }
}
function signalPointer(event) {
  const box = $('signal').getBoundingClientRect(), line = box.height - 40;
  const i = Math.round((event.clientX - box.left) / box.width * (length - 1));
  const at = Math.max(0, Math.min(length - 1, i));
  const value = (line / 2 - (event.clientY - box.top)) * 3.2 / line;
  if (event.type === 'pointerdown') {
    $('signal').setPointerCapture(event.pointerId);
    if (!signal.running) signal.drag = [at, at];
  }
  if (event.type === 'pointerup' || event.type === 'pointercancel') {
    if (signal.drag && Math.abs(signal.drag[1] - signal.drag[0]) > 5)
      signal.marks = [signal.marks[1], [Math.min(...signal.drag), Math.max(...signal.drag)]], writeMarks();
    signal.drag = null, signal.hand = null;
  } else if (signal.running && event.buttons) signal.hand = Math.max(-1.5, Math.min(1.5, value));
  else if (signal.drag) signal.drag[1] = at;
  redraw('signal');
}

/* While it runs, the arrows hold the signal higher or lower, and Escape lets it go. */
function signalKey(event) {
  const move = { ArrowUp: 0.15, ArrowDown: -0.15 }[event.key];
  if (!signal.running || (!move && event.key !== 'Escape')) return;
  event.preventDefault();
  signal.hand = move ? Math.max(-1.5, Math.min(1.5, (signal.hand || 0) + move)) : null;
}

/* ---- the beginning ----------------------------------------------------------------------------------------------- */

function listen() {
  ['n', 'l'].forEach((id) => $(id).addEventListener('input', see));
  $('t').addEventListener('input', showValues);
  $('by').addEventListener('change', () => redraw('loss'));
  $('go').addEventListener('click', guarded('train-says', go));
  $('anew').addEventListener('click', guarded('train-says', async () => {
    await anew();
    say('train-says', 'This is a new model, which is not trained yet.');
  }));
  ['lr', 'steps'].forEach((id) => $(id).addEventListener('change', guarded('train-says', async () => {
    await trainer.ask('change', speed());
    if (lm.otherRunning) await other.ask('change', speed());
  })));
  $('beside').addEventListener('change', guarded('train-says', async () => {
    if (!lm.running) return;
    if ($('beside').checked) await startOther(encode(lm.text), speed());
    else await stopOther();
  }));
  $('text-own').addEventListener('click', () => setText($('own').textContent.slice(1), 'The piece of luna.h'));
  const chosen = (id, where, work) => $(id).addEventListener('change', () => {
    if ($(id).files.length) guarded(where, work)($(id).files[0]);
  });
  chosen('text-file', 'text-says', setFile);
  chosen('load', 'take-says', load);
  $('text').addEventListener('input', () => {
    lm.text = $('text').value;
    say('text-says', `Your text has ${whole(lm.text.length)} characters.`);
  });
  /* a long text would make the box slow: it goes past it */
  $('text').addEventListener('paste', (event) => {
    const text = event.clipboardData ? event.clipboardData.getData('text') : '';
    if (text.length <= visible && !lm.cut) return;
    event.preventDefault();
    setText(text, 'The pasted text');
  });
  dropZone('text-drop', guarded('text-says', setFile));
  $('sentence').addEventListener('input', peek);
  $('layer').addEventListener('change', peek);
  $('maps').addEventListener('pointermove', readCell);
  $('save').addEventListener('click', guarded('take-says', save));
  $('english').addEventListener('click', guarded('take-says', takeEnglish));
  dropZone('load-drop', guarded('take-says', load));
  $('learn').addEventListener('click', guarded('stream-says', learn));
  $('play').addEventListener('click', guarded('stream-says', play));
  [0, 1].forEach((i) => ['from', 'to'].forEach((end, k) => $(end + i).addEventListener('input', () => {
    signal.marks[i][k] = Math.max(0, Math.min(length - 1, +$(end + i).value));
    redraw('signal');
  })));
  ['pointerdown', 'pointermove', 'pointerup', 'pointercancel'].forEach((kind) =>
    $('signal').addEventListener(kind, signalPointer));
  $('signal').addEventListener('keydown', signalKey);
  $('signal').addEventListener('blur', () => { signal.hand = null; });
  const all = () => redraw(...drawings.keys());
  new ResizeObserver(() => { see(), all(); }).observe($('picture'));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', all);
}

async function begin() {
  const own = () => setText($('own').textContent.slice(1), 'The piece of luna.h');
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));      /* after the first layout */
  for (const part of [see, makeMatrices, clearTimes, firstSignal, own, listen]) {
    part();
    await new Promise((done) => setTimeout(done));         /* each a task of its own: none is long */
  }
  redraw(...drawings.keys());
  if (typeof WebAssembly !== 'object' || !simd())
    return say('state', 'This browser has no WebAssembly SIMD, which this page needs; any browser since ' +
      '2023 has it. The picture of part 1 works without it; nothing else does.', true);
  try {
    compiled = await WebAssembly.compile(await unpacked('wasm'));
    $('wasm').textContent = '';
    tools = new Helper(compiled, (data) => tools.hear && tools.hear(data));
    trainer = new Helper(compiled, (data) => heard(data, false));
    await Promise.all([tools.ready, trainer.ready]);
  } catch (error) {
    return say('state', `luna.h could not be started here: ${error.message}`, true);
  }
  $('measure').addEventListener('click', () => measure(compiled));
  follow();
  try { await anew(); } catch (error) { say('train-says', error.message, true); }
  ['measure', 'go', 'save', 'english', 'learn', 'play'].forEach((id) => { $(id).disabled = false; });
  say('state', 'Ready. luna.h runs in this page on WebAssembly SIMD, with one thread a model.');
}
begin();
