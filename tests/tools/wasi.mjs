// node wasi.mjs PROGRAM.wasm: runs it with this folder and this environment
import { readFileSync } from 'node:fs';
import { WASI } from 'node:wasi';
const program = process.argv[2];
const preopens = { '.': '.' };
const wasi = new WASI({ version: 'preview1', args: [program], env: process.env, preopens, returnOnExit: true });
const { instance } = await WebAssembly.instantiate(readFileSync(program), { wasi_snapshot_preview1: wasi.wasiImport });
process.exit(wasi.start(instance));
