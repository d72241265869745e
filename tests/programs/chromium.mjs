/* chromium.mjs: a headless Chromium by its DevTools protocol, over a pipe: node alone is enough.

     const browser = await Browser.open(folder);           null where there is none
     const page = await browser.page({ width, height, dark });
     await page.go('file:///...');
     await page.run('1 + 1');                              a value of the page; promises are awaited
     page.errors                                           what the console had of them
     await browser.tasks(work);                            milliseconds of CPU of its tasks while work() goes on
     await browser.close(); */
import { spawn, spawnSync } from 'node:child_process';
import { mkdirSync, rmSync, writeFileSync } from 'node:fs';
import { resolve } from 'node:path';

export const sleep = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

class Page {
  constructor(browser, session) {
    Object.assign(this, { browser, session, errors: [] });
    browser.heard.set(session, (method, params) => {
      if (method === 'Runtime.exceptionThrown') this.errors.push(params.exceptionDetails.exception?.description ||
                                                                 params.exceptionDetails.text);
      if (method === 'Runtime.consoleAPICalled' && params.type === 'error')
        this.errors.push(params.args.map((a) => a.value ?? a.description).join(' '));
      if (method === 'Log.entryAdded' && params.entry.level === 'error') this.errors.push(params.entry.text);
      if (method === 'Page.loadEventFired') this.loaded?.();
    });
  }
  ask(method, params) { return this.browser.ask(method, params, this.session); }
  async go(url) {
    const loaded = new Promise((done) => { this.loaded = done; });
    await this.ask('Page.navigate', { url });
    await loaded;
  }
  async run(expression) {
    const { result, exceptionDetails: failed } = await this.ask('Runtime.evaluate',
        { expression, awaitPromise: true, returnByValue: true });
    if (failed) throw new Error(`${expression}: ${failed.exception?.description || failed.text}`);
    return result.value;
  }
  /* waits until an expression of the page is true; false after two minutes */
  async until(expression) {
    for (const end = Date.now() + 120000; Date.now() < end; await sleep(50))
      if (await this.run(expression)) return true;
    return false;
  }
  async key(key, modifiers = 0) {
    const text = key === 'Enter' ? '\r' : key === ' ' ? ' ' : undefined;
    const codes = { Enter: 13, ' ': 32, Tab: 9, Home: 36, ArrowLeft: 37, ArrowUp: 38, ArrowRight: 39, ArrowDown: 40 };
    const what = { key, code: key, windowsVirtualKeyCode: codes[key], modifiers };
    await this.ask('Input.dispatchKeyEvent', { type: text ? 'keyDown' : 'rawKeyDown', text, ...what });
    await this.ask('Input.dispatchKeyEvent', { type: 'keyUp', ...what });
  }
  async drag(from, to) {
    const event = (type, [x, y], buttons) => this.ask('Input.dispatchMouseEvent',
        { type, x, y, button: 'left', buttons, clickCount: 1 });
    await event('mousePressed', from, 1);
    for (let i = 1; i <= 8; i++) await event('mouseMoved', from.map((v, k) => v + (to[k] - v) * i / 8), 1);
    await event('mouseReleased', to, 0);
  }
  async file(selector, path) {
    const { result } = await this.ask('Runtime.evaluate', { expression: `document.querySelector('${selector}')` });
    await this.ask('DOM.setFileInputFiles', { files: [resolve(path)], objectId: result.objectId });
  }
  /* the whole page, as it stands */
  async picture(path) {
    const { data } = await this.ask('Page.captureScreenshot', { format: 'png', captureBeyondViewport: true });
    writeFileSync(path, Buffer.from(data, 'base64'));
  }
  look({ width, height, dark }) {
    return Promise.all([
      this.ask('Emulation.setDeviceMetricsOverride', { width, height, deviceScaleFactor: 1, mobile: false }),
      this.ask('Emulation.setScrollbarsHidden', { hidden: true }),
      this.ask('Emulation.setEmulatedMedia',
               { features: [{ name: 'prefers-color-scheme', value: dark ? 'dark' : 'light' }] })]);
  }
  close() { return this.browser.ask('Target.closeTarget', { targetId: this.target }); }
}

export class Browser {
  static async open(folder) {
    const name = ['chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable'].find((each) =>
      spawnSync('sh', ['-c', `command -v ${each}`]).status === 0);
    if (!name) return null;
    const b = new Browser(), profile = resolve(folder, 'profile');
    rmSync(profile, { recursive: true, force: true });
    mkdirSync(profile, { recursive: true });
    const flags = ['--headless=new', '--no-sandbox', '--disable-gpu', '--no-first-run', '--remote-debugging-pipe',
      '--disable-background-timer-throttling', '--disable-renderer-backgrounding', `--user-data-dir=${profile}`,
      'about:blank'];
    b.process = spawn(name, flags, { stdio: ['ignore', 'ignore', 'ignore', 'pipe', 'pipe'] });
    Object.assign(b, { profile, folder: resolve(folder), next: 1, downloads: [] });
    b.waiting = new Map(), b.heard = new Map();
    let rest = Buffer.alloc(0);
    b.process.stdio[4].on('data', (data) => {
      rest = Buffer.concat([rest, data]);
      for (let end = rest.indexOf(0); end >= 0; end = rest.indexOf(0)) {
        b.take(JSON.parse(rest.subarray(0, end).toString()));
        rest = rest.subarray(end + 1);
      }
    });
    b.process.on('exit', () => {
      for (const asked of b.waiting.values()) asked.fail(new Error('Chromium has ended'));
    });
    await b.ask('Browser.setDownloadBehavior', { behavior: 'allow', downloadPath: b.folder, eventsEnabled: true });
    return b;
  }
  take(message) {
    const asked = this.waiting.get(message.id);
    this.waiting.delete(message.id);
    if (asked && message.error) asked.fail(new Error(`${asked.method}: ${message.error.message}`));
    else if (asked) asked.done(message.result);
    if (message.method === 'Browser.downloadProgress' && message.params.state === 'completed')
      this.downloads.push(message.params);
    if (message.method) this.heard.get(message.sessionId)?.(message.method, message.params);
  }
  ask(method, params = {}, sessionId = undefined) {
    const id = this.next++;
    this.process.stdio[3].write(JSON.stringify({ id, method, params, sessionId }) + '\0');
    return new Promise((done, fail) => this.waiting.set(id, { done, fail, method }));
  }
  /* script: runs in the page before its own */
  async page({ width = 1280, height = 900, dark = false, script = '' } = {}) {
    const { targetId } = await this.ask('Target.createTarget', { url: 'about:blank' });
    const { sessionId } = await this.ask('Target.attachToTarget', { targetId, flatten: true });
    const page = new Page(this, sessionId);
    page.target = targetId;
    await Promise.all(['Page.enable', 'Runtime.enable', 'Log.enable', 'DOM.enable'].map((method) => page.ask(method)));
    if (script) await page.ask('Page.addScriptToEvaluateOnNewDocument', { source: script });
    await page.look({ width, height, dark });
    return page;
  }
  /* Of the main thread of the page that was opened in this or an earlier call: what other programs do on this machine
     does not count, as it does in long tasks, nor do Chromium's own pages. */
  async tasks(work) {
    const events = [], categories = ['toplevel', 'disabled-by-default-devtools.timeline', 'devtools.timeline'];
    const complete = new Promise((done) => this.heard.set(undefined, (method, { value }) => {
      if (method === 'Tracing.dataCollected') for (const event of value) events.push(event);
      if (method === 'Tracing.tracingComplete') done();
    }));
    await this.ask('Tracing.start', { traceConfig: { includedCategories: categories } });
    try { await work(); } finally {
      await this.ask('Tracing.end');
      await complete;
    }
    const thread = (event) => event.pid + '/' + event.tid;
    const parsed = events.find((event) => event.name === 'ParseHTML' && event.args.beginData?.url?.startsWith('file:'));
    if (parsed) this.main = thread(parsed);
    return events.filter((event) => event.name.endsWith('RunTask') && thread(event) === this.main)
      .map((event) => (event.tdur || 0) / 1000);
  }
  async close() {
    const ended = new Promise((done) => this.process.once('exit', done));
    this.process.kill();
    await ended;
    rmSync(this.profile, { recursive: true, force: true, maxRetries: 5, retryDelay: 200 });
  }
}
