/* node web.mjs BUILD: tests of examples/web, for tests/programs/web.sh; with a second word, picture, it draws README's
   anew. With TIMES=1 in the environment the page's times must reach their goals, for which the machine must be
   quiet. */
import { spawnSync } from 'node:child_process';
import { readFileSync, rmSync, writeFileSync } from 'node:fs';
import { resolve } from 'node:path';
import { performance } from 'node:perf_hooks';
import { runInThisContext } from 'node:vm';
import { gzipSync } from 'node:zlib';
import { Browser, sleep } from './chromium.mjs';

const build = process.argv[2] || 'build', html = resolve(build, 'luna.html'), folder = resolve(build, 'web');
const address = 'file://' + html, drawn = 'examples/web/luna.svg', header = readFileSync('luna.h', 'utf8');
let passed = 0, failed = 0;
function check(good, what) {
  good ? passed++ : failed++;
  if (!good) console.log(`FAILED: ${what}`);
}
/* A time without TIMES=1 may be ten times its goal: a page that computes where it draws takes more than that. */
const strict = process.env.TIMES === '1';
const checkTime = (took, goal, what) =>
  check(took < goal * (strict ? 1 : 10), `${what} takes ${took} ms; the goal is ${goal} ms`);
const sentence = (work) => {
  try { work(); } catch (error) { return error.message; }
  return '';
};

/* ---- what it computes, under node -------------------------------------------------------------------------------- */

const small = { layers: 1, dim: 32, heads: 4, memory: 8, window: 64, batch: 2, softmax: 0, seed: 1 };
const Luna = runInThisContext(readFileSync('examples/web/engine.js', 'utf8') + '; Luna');
const module = new WebAssembly.Module(readFileSync(resolve(folder, 'page.wasm')));

async function underNode(text) {
  const luna = await Luna.open(module), imports = WebAssembly.Module.imports(module).map((each) => each.name);
  check(imports.sort().join() === 'clock_time_get,write', `it imports ${imports}`);
  luna.text(text), luna.model(small);
  const losses = [];
  for (let step = 0; step < 200; step++) losses.push(luna.train(5e-3, 200));
  const checkpoint = luna.save(), first = losses[0], last = losses.at(-1);
  check(first > 5 && last < 3.6, `200 steps lower the loss: ${first} to ${last}`);
  const native = spawnSync(resolve(folder, 'native'), ['luna.h', text.length, 200, ...Object.values(small)]);
  const beside = parseFloat(native.stdout.toString());
  console.log(`loss after 200 steps: ${last} in WebAssembly, ${beside} in machine code`);
  check(Math.abs(last - beside) < 0.02 * beside, `the loss in machine code is ${beside}, here ${last}`);

  for (const bad of [text.subarray(0, 5000), checkpoint.subarray(0, 3000), new Uint8Array(0)])
    check(sentence(() => luna.load(bad)).includes('not a valid safetensors file'), 'a file that is no checkpoint');
  check(sentence(() => luna.text(text.subarray(0, 99))).includes('too short'), 'a short text');
  check(sentence(() => luna.model({ ...small, dim: 6144, layers: 8 })).includes('memory'), 'memory ends, a sentence');
  check(sentence(() => luna.model({ ...small, dim: 33 })).includes('multiple'), 'a size that cannot be');
  check(Buffer.compare(luna.save(), checkpoint) === 0, 'none of these changed what was learnt');
  luna.load(checkpoint);
  check(luna.step === 200 && luna.settings.dim === 32, 'a checkpoint brings its step and sizes');
  for (let step = 200; step < 220; step++) luna.train(5e-3, 220);
  const later = luna.save(), map = luna.look(Buffer.from('hello'), 0);
  const sums = [0, 1, 2, 3, 4].map((t) => map.unpack.slice(8 * t, 8 * t + 8).reduce((a, b) => a + b));
  check(sums.every((sum) => Math.abs(sum - 1) < 1e-5), 'each character reads shares of the slots');
  check(map.pack.every((v) => v > 0) && map.state > 0, 'the pack is positive, and a state has a size');
  const file = resolve(folder, 'routed.safetensors');
  check(spawnSync(resolve(folder, 'native'), [file]).status === 0, 'a model whose memory is routed is written');
  luna.load(readFileSync(file));
  const routed = luna.look(Buffer.from('hello'), 1), reads = Array.from({ length: 10 }, (_, i) =>
    routed.unpack.slice(8 * i, 8 * i + 8));
  check(reads.every((row) => Math.abs(row.reduce((a, b) => a + b) - 1) < 1e-5), 'a routed memory is read');
  check([0, 5].every((first) => reads[first].filter((v) => v > 0).length === 2), 'at first two slots are not empty');
  check(routed.pack.every((v) => v >= 0 && v <= 1) && routed.pack.some((v) => v === 0), 'not every slot is written to');
  luna.load(later);
  check(Buffer.from(luna.sample(Buffer.from('the'), 30, 0.8)).length === 30, 'it writes');
  const numbers = luna.equations([1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0], [2, 0, 0, 0, 2, 0]);
  const weight = Math.exp(2 / Math.sqrt(3)), expected = weight / (2 * weight + 2);
  check(Math.abs(numbers.pack[0] - expected) < 1e-6, `the pack's first weight is ${numbers.pack[0]}, not ${expected}`);
  check(luna.time(256, 16).every((v) => v > 0), 'attention takes time');
  return { checkpoint, later, losses };
}

/* ---- the page ---------------------------------------------------------------------------------------------------- */

const watch = `window.longTasks = [], window.shift = 0;
  new PerformanceObserver((list) => longTasks.push(...list.getEntries().map((e) => [e.startTime, e.duration])))
    .observe({ type: 'longtask', buffered: true });
  new PerformanceObserver((list) => list.getEntries().forEach((e) => { if (!e.hadRecentInput) shift += e.value; }))
    .observe({ type: 'layout-shift', buffered: true });`;
/* [how many, a mark of what they show] of a thirteenth of a canvas's pixels */
const paint = (id) => `(() => { const c = $('${id}');
  const all = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  let count = 0, sum = 0;
  for (let i = 3; i < all.length; i += 52) if (all[i]) count++, sum = (sum * 31 + all[i - 1] + i) % 1000003;
  return [count, sum]; })()`;
/* pixels of a canvas that are no gray: how much of the plot's lines there is, whatever its axes say */
const coloured = (id) => `(() => { const c = $('${id}');
  const all = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  let count = 0;
  for (let i = 0; i < all.length; i += 4) if (all[i + 3] && Math.abs(all[i] - all[i + 2]) > 40) count++;
  return count; })()`;
const text = (page, id) => page.run(`$('${id}').textContent`);
const ready = (page) => page.until(`$('state').textContent.startsWith('Ready') && !$('go').disabled`);
async function set(page, id, value) {
  await page.run(`$('${id}').value = ${JSON.stringify(String(value))}; $('${id}').dispatchEvent(new Event('change'))`);
}
async function download(browser, page) {
  const before = browser.downloads.length;
  rmSync(resolve(folder, 'luna.safetensors'), { force: true });
  await page.run(`$('save').click()`);
  for (let i = 0; i < 2400 && browser.downloads.length === before; i++) await sleep(50);
  return readFileSync(resolve(folder, 'luna.safetensors'));
}

async function opens(browser) {
  const page = await browser.page({ script: watch });
  await page.go(address);
  check(await ready(page), 'it gets ready: ' + await text(page, 'state'));
  check((await page.run('location.protocol')) === 'file:', 'it was opened from disk');
  await sleep(1000);
  return page;
}
async function holds(page) {
  const excerpts = await page.run(`[...document.querySelectorAll('pre.lines')].map((e) => e.textContent)`);
  check(excerpts.length === 5 && excerpts.every((each) => header.includes(each)), 'the excerpts are of this luna.h');
  const unnamed = await page.run(`[...document.querySelectorAll('input, select, textarea')].filter((e) =>
    !e.labels.length).map((e) => e.id)`);
  check(unnamed.length === 0, `without a label: ${unnamed}`);
  const low = await page.run(contrast);
  check(low.length === 0, `contrast below 4.5: ${JSON.stringify(low)}`);
  const picture = await page.run('picture(24, 4, { alone: true })');
  if (process.argv[3] === 'picture') writeFileSync(drawn, picture + '\n');
  check(readFileSync(drawn, 'utf8') === picture + '\n' && picture.length < 60000, `${drawn} is what the page draws`);
}
const contrast = `(() => { const light = (c) => { const d = document.createElement('canvas').getContext('2d');
    d.fillStyle = c, d.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...d.getImageData(0, 0, 1, 1).data].map((v) => v / 255).map((v) =>
      v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const out = [];
  for (const ground of ['paper', 'card']) for (const ink of ['ink', 'soft', 'accent', 'x', 'p', 'yp', 'yx', 'alarm']) {
    const [a, b] = [light(style(ground)), light(style(ink))].sort((p, q) => q - p), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) out.push([ground, ink, ratio]);
  }
  return out; })()`;

/* While work goes on no task of the page takes long; what the checks themselves take is not in there. */
async function short(browser, what, work) {
  const tasks = await browser.tasks(work), worst = Math.max(...tasks);
  console.log(`${what}: the longest of ${tasks.length} tasks takes ${worst.toFixed(1)} ms of the CPU`);
  check(tasks.length > 50, `${what}: ${tasks.length} tasks`);
  checkTime(worst, 50, `${what}: a task`);
}
/* parts 1 and 2, by keyboard */
async function follows(page) {
  const before = await text(page, 'm-yp'), counts = await text(page, 'counts');
  await page.run(`document.querySelector('#m-x [role=slider]').focus()`);
  for (let i = 0; i < 5; i++) await page.key('ArrowRight');
  const changes = (id, from) => page.until(`$('${id}').textContent !== ${JSON.stringify(from)}`);
  check(await changes('m-yp', before), 'a number moves by keys, Y_P follows');
  await page.run(`$('l').focus()`);
  await page.key('ArrowRight');
  check(await text(page, 'counts') !== counts, 'the slider of l moves by keys');
  const box = await page.run(`(() => { const c = document.querySelectorAll('#m-x [role=slider]')[1]; c.scrollIntoView();
    const b = c.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()`);
  const dragged = await text(page, 'm-yx');
  await page.drag(box, [box[0] + 60, box[1]]);
  check(await changes('m-yx', dragged), 'a number is dragged, Y_X follows');
}

async function trains(browser, page, node) {
  for (const [id, value] of Object.entries({ layers: 1, dim: 32, memory: 8, window: 64, batch: 2, steps: 200 }))
    await set(page, id, value);
  const blank = await page.run(coloured('loss')), map = await page.run(paint('maps'));
  await page.run(`longTasks.length = 0; shift = 0; $('go').focus()`);
  await short(browser, 'training', async () => {
    const start = performance.now();
    await page.key('Enter');
    check(await page.until('curves.luna.length > 0'), 'a loss is drawn: ' + await text(page, 'train-says'));
    const took = performance.now() - start;
    console.log(`first loss after ${(took / 1000).toFixed(2)} s`);
    checkTime(took, 2000, 'the first loss');
    check(await page.until('!lm.running && lm.step === 200'), 'it makes 200 steps: ' +
      await text(page, 'train-says'));
    await sleep(300);
  });
  const long = await page.run('longTasks'), shift = await page.run('shift');
  console.log(`long tasks while training: ${long.length}` + (long.length ? `, the longest ${Math.round(Math.max(
    ...long.map((each) => each[1])))} ms` : '') + `; layout shift ${shift.toFixed(4)}`);
  check(!strict || long.length === 0, `${long.length} tasks above 50 ms`);
  check(shift < 0.01, `the layout shifts by ${shift}`);
  const now = await page.run(coloured('loss'));
  check(now > blank + 200, `the loss is drawn: ${blank} coloured pixels, then ${now}`);
  const mapNow = await page.run(paint('maps'));
  check(mapNow[0] > 100 && mapNow[1] !== map[1], 'the heat maps are drawn, and change');
  const losses = await page.run('curves.luna.map((point) => point[2])');
  check(losses.length === 200 && losses.every((loss, i) => loss === node.losses[i]), 'the losses are those of node');
  check((await text(page, 'sample')).length > 100, 'it shows what it writes');
  check(Buffer.compare(await download(browser, page), node.checkpoint) === 0, 'the checkpoint has the bytes of node');
}

async function goesOn(browser, node) {
  const page = await browser.page({ script: watch });
  await page.go(address);
  await ready(page);
  await page.file('#load', resolve(folder, 'luna.safetensors'));
  check(await page.until('lm.step === 200'), 'a checkpoint loads: ' + await text(page, 'take-says'));
  await set(page, 'steps', 220);
  await page.run(`$('go').click()`);
  check(await page.until('!lm.running && lm.step === 220'), 'it goes on: ' + await text(page, 'train-says'));
  check(Buffer.compare(await download(browser, page), node.later) === 0, 'and has the bytes of node afterwards');
  writeFileSync(resolve(folder, 'nothing.safetensors'), 'this is no checkpoint, but long enough to be read as one');
  await page.file('#load', resolve(folder, 'nothing.safetensors'));
  check(await page.until(`$('take-says').textContent.includes('is no checkpoint')`), 'no checkpoint, a sentence');
  check((await page.run(`trainer.ask('stop')`)).step === 220, 'and nothing is lost');
  check(page.errors.length === 0, `errors: ${page.errors}`);
  return page;
}

async function takesEnglish(page) {
  await page.run(`$('english').click()`);
  check(await page.until(`$('take-says').textContent.includes('bundled model')`), 'a model of English comes along: ' +
    await text(page, 'take-says'));
  const sample = await text(page, 'sample'), words = sample.split(/[^a-z]+/i);
  check(words.filter((word) => ['the', 'and', 'to', 'of', 'my', 'you', 'I', 'that', 'is'].includes(word)).length >= 5,
    'which writes English: ' + sample.slice(0, 200));
  check(await page.run('lm.step === 0 && lm.shape.dim === 40'), 'and is as untrained here as it says');
}

async function takesTexts(page) {
  const paste = (value) => page.run(`(() => { const data = new DataTransfer(); data.setData('text', ${value});
    const event = new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true });
    $('text').dispatchEvent(event); })()`);
  await paste(`'All work and no play. '.repeat(476190)`);
  const says = await text(page, 'text-says');
  check(says.includes('10,476,180 characters'), 'a paste of 10 MB: ' + says);
  check(await page.run(`$('text').value.length`) === 10000, 'of which the box has the beginning');
  await set(page, 'steps', 230);
  await page.run(`$('go').click()`);
  check(await page.until('!lm.running && lm.step === 230'), 'which is learnt: ' + await text(page, 'train-says'));
  await page.run(`$('text-own').click(); setText('', 'Your text'); $('go').click()`);
  check(await page.until(`$('train-says').textContent.includes('too short')`), 'an empty text, a sentence');
  await set(page, 'layers', 9);
  await page.run(`$('anew').click()`);
  check(await page.until(`$('train-says').textContent.includes('from 1 to 8')`), 'a size out of range, a sentence');
}

async function streams(page) {
  const before = await page.run(paint('signal'));
  await page.run(`$('learn').click()`);
  check(await page.until('signal.learnt'), 'the detector learns: ' + await text(page, 'stream-says'));
  const hit = await page.run(`signal.marks.every(([from, to]) =>
    signal.found.slice(from, to + 10).some((v) => v > 0.5))`);
  check(hit, 'it finds its examples');
  await page.run(`$('play').click()`);
  check(await page.until('signal.at > 512 + 300'), 'the signal runs');
  await page.run(`$('signal').focus()`);
  for (let i = 0; i < 4; i++) await page.key('ArrowUp');
  const held = await page.until('signal.values.slice(-40).every((v) => Math.abs(v - 0.6) < 1e-6)');
  check(held, 'the arrows hold it: ' + await page.run('signal.values.at(-1)'));
  await page.key('Escape');
  check(await page.until('signal.hand === null && Math.abs(signal.values.at(-1) - 0.6) > 1e-6'), 'and let it go');
  await page.run(`$('play').click()`);
  check((await page.run(paint('signal')))[1] !== before[1], 'and is drawn');
}

async function inChromium(browser, node) {
  let page;
  await short(browser, 'opening and equations', async () => {
    page = await opens(browser);
    await follows(page);
  });
  await holds(page);
  await trains(browser, page, node);
  await page.run(`$('beside').click(); $('steps').value = 240; $('go').click()`);
  check(await page.until(`!lm.otherRunning && curves.other.length >= 200`), 'a softmax model learns beside it');
  const later = await goesOn(browser, node);
  await takesTexts(later);
  await takesEnglish(later);
  await later.close();
  await streams(page);
  await page.run(`lengths.length = 4; $('measure').click()`);
  check(await page.until('times.length === 4 && !$("measure").disabled'), 'attention is measured');
  for (const [width, height] of [[1280, 900], [400, 800]])
    for (const dark of [false, true]) {
      await page.look({ width, height, dark });
      await sleep(700);
      const name = `${width}-${dark ? 'dark' : 'light'}.png`;
      await page.picture(resolve(folder, name));
      check(await page.run('document.documentElement.scrollWidth') <= width, `nothing is wider than ${width} pixels`);
      check((await page.run(contrast)).length === 0, `contrast: ${name}`);
    }
  check(page.errors.length === 0, `errors: ${page.errors}`);
  const old = await browser.page({ script: 'WebAssembly.validate = () => false;' });
  await old.go(address);
  check(await old.until(`$('state').textContent.includes('no WebAssembly SIMD')`), 'without SIMD, a sentence');
}

const own = readFileSync(html, 'utf8').match(/<script type="text\/plain" id="own">\n([^]*?)<\/script>/)[1];
const size = gzipSync(readFileSync(html), { level: 9 }).length;
console.log(`${html}: ${size} bytes by gzip -9`);
check(size <= 300000, `the page has ${size} bytes by gzip -9`);
check(header.startsWith(own), 'its text is the beginning of luna.h');
const node = await underNode(Buffer.from(own));
const browser = await Browser.open(folder);
if (!browser) console.log('skipped: chromium is not here: the page itself is not looked at');
else {
  try { await inChromium(browser, node); } catch (error) { check(false, error.stack); }
  await browser.close();
}
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
