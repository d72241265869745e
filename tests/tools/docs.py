"""One page of reference out of luna.h: its manual, every public declaration beside its comment, and the programs of
README and of the guide. Those that are files of examples/ as well must be the same there.

    python3 tests/tools/docs.py luna.h README.md build/luna_reference.html [examples/guide.md]

A chapter is a comment that opens with >>tag; an entry is a comment and the declarations that follow it up to the next
one. Names link to where they are declared, numbers of equations to a table of what implements them. The page needs
nothing else: the search reads what stands in it."""
import glob
import html
import os
import re
import sys

EXAMPLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples")
STYLE = """
:root { --text: #1c1e21; --dim: #5c6370; --line: #d9dce1; --back: #fff; --side: #f5f6f8; --link: #0b57a4; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e3e5e8; --dim: #9aa1ac; --line: #3a3f47; --back: #1b1d21; --side: #23262b; --link: #79b8ff; } }
* { box-sizing: border-box; }
body { margin: 0; color: var(--text); background: var(--back); font: 15px/1.5 system-ui, sans-serif; }
nav { position: fixed; inset: 0 auto 0 0; width: 230px; overflow-y: auto; padding: 16px; background: var(--side); }
nav a { display: block; padding: 2px 0; }
nav input { width: 100%; padding: 6px 8px; margin-bottom: 10px; font: inherit; color: inherit;
  background: var(--back); border: 1px solid var(--line); border-radius: 4px; }
main { margin-left: 230px; padding: 16px 32px 80px; max-width: 1080px; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
h1 { font-size: 26px; } h2 { margin-top: 44px; padding-top: 8px; border-top: 1px solid var(--line); }
pre { overflow-x: auto; margin: 6px 0; padding: 10px 12px; font: 12.5px/1.45 ui-monospace, monospace;
  background: var(--side); border-radius: 4px; }
pre.text { background: none; padding: 0; font-size: 12px; }
section.entry { padding: 8px 0; border-bottom: 1px solid var(--line); }
section.entry p { margin: 4px 0; max-width: 76ch; }
section.entry:has(:target) { background: var(--side); }
table { border-collapse: collapse; } td, th { padding: 4px 14px 4px 0; text-align: left; vertical-align: top; }
td a { overflow-wrap: anywhere; }
.hidden { display: none; } #count { color: var(--dim); min-height: 1.5em; }
@media (max-width: 760px) { nav { position: static; width: auto; } nav a { display: inline-block; margin-right: 12px; }
  main { margin: 0; padding: 8px 14px 60px; } }
"""
SCRIPT = """
const input = document.querySelector('nav input'), count = document.getElementById('count');
const entries = [...document.querySelectorAll('section.entry')];
const texts = entries.map(e => e.textContent.toLowerCase());
function search() {
  const words = input.value.toLowerCase().split(/\\s+/).filter(Boolean);
  const equation = input.value.match(/^\\s*eq(?:s|uation)?\\.?\\s*\\(?([1-7])\\)?\\s*$/i);
  const row = equation && document.getElementById('equation' + equation[1]);
  let found = 0;
  entries.forEach((e, i) => {
    const fits = row ? e.contains(row) : words.every(w => texts[i].includes(w));
    e.classList.toggle('hidden', !fits);
    found += fits;
  });
  if (row) row.scrollIntoView({ block: 'center' });
  document.querySelectorAll('.chapter').forEach(c =>
    c.classList.toggle('hidden', words.length > 0 && !c.querySelector('.entry:not(.hidden)')));
  count.textContent = words.length ? found + ' of ' + entries.length + ' entries' : '';
}
input.addEventListener('input', search);
window.addEventListener('hashchange', () => { input.value = ''; search(); });
document.addEventListener('keydown', e => {
  if (e.key === '/' && document.activeElement !== input) { e.preventDefault(); input.focus(); } });
"""
EQUATIONS = {1: ("attention", "Attn(X, C) = softmax(X W_Q (C W_K)^T / sqrt(d)) C W_V"),
             2: ("Transformer layer", "X_A = LayerNorm(Attn(X, C) + X), X' = LayerNorm(FFN(X_A) + X_A)"),
             3: ("pack", "Y_P = Attn(P, C)"), 4: ("unpack", "Y_X = Attn(X, Y_P)"),
             5: ("Luna attention", "Y_X, Y_P = LunaAttn(X, P, C): pack, then unpack"),
             6: ("Luna layer", "X_A, P_A = LayerNorm(Y_X + X), LayerNorm(Y_P + P); X', P' = "
                               "LayerNorm(FFN(X_A) + X_A), P_A"),
             7: ("causal function", "f(X, Y, Z)_t = (1/t) X_t sum_{j<=t} Y_j^T Z_j")}
PREPROCESSOR = r"#(if|ifdef|ifndef|else|elif|endif|undef|include|pragma|define (LI_\w*|LUNA_API|LUNA_NO_\w*))\b"
CITED = re.compile(r"\beqs?\. ([1-7])(?:(-|, | and )([1-7]))?")


def strip_comment(text):
    """The text of a comment, without its marks and rules; its lines lose what they are indented by in common."""
    lines = [line for line in text.strip()[2:-2].split("\n") if not re.fullmatch(r"\s*[-=]{16,}\s*", line)]
    indents = [len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()]
    cut = min(indents, default=0)
    return "\n".join([lines[0].strip()] + [line[cut:].rstrip() for line in lines[1:]]).strip("\n") if lines else ""


def declared(code):
    """The public names that a piece of code declares: functions, types, enumerators, macros."""
    bare = re.sub(r"/\*.*?\*/", "", code, flags=re.S)
    bare = re.sub(r"\{[^{}]*\}", "", re.sub(r"^#(?:.*\\\n)*.*", "", bare, flags=re.M))
    names = re.findall(r"^\w[^;=]*?\b(luna_\w+)\(", bare, re.M)
    names += re.findall(r"(?:typedef |^)(?:struct|enum) (luna_\w+)", code, re.M)
    names += re.findall(r"\(\*(luna_\w+)\)\(", code)
    names += re.findall(r"^#define (LUNA_\w+)", code, re.M)
    for body in re.findall(r"enum luna_\w+ \{(.*?)\}", code, re.S):
        names += re.findall(r"\b(LUNA_[A-Z0-9_]+)\b(?=\s*(?:=|,|$|\n|/))", re.sub(r"/\*.*?\*/", "", body, flags=re.S))
    return list(dict.fromkeys(names))


def read_chapters(public):
    """[(tag, title, text, [(comment, code)])] of the public part."""
    chapters, comment = [], ""
    pieces = re.split(r"(^/\*.*?\*/[ \t]*\n|^(?=\n))", public, flags=re.M | re.S)
    for piece in pieces:
        if not piece.strip():
            comment = comment if piece else comment
            continue
        if piece.startswith("/*"):
            text = strip_comment(piece)
            head = re.match(r">>(\w+)[:.]? ?(.*)", text)
            if head:
                rest = text.split("\n", 1)
                title, body = head.group(2), rest[1] if len(rest) > 1 else ""
                while body and not title.endswith((".", ":")) and body.split("\n")[0][:1].islower():
                    first, _, body = body.partition("\n")      # a title of more than one line
                    title += " " + first.strip()
                chapters.append((head.group(1), title, body, []))
                comment = ""
            else:
                comment = f"{comment}\n{text}" if comment else text
            continue
        code = "\n".join(line.replace("LUNA_API ", "") for line in piece.strip("\n").split("\n")
                         if not re.match(PREPROCESSOR, line))
        if chapters and code.strip():
            chapters[-1][3].append((comment, code.strip("\n")))
            comment = ""
    return chapters


def make_linker(places, tags):
    def link(text, own=()):
        def one(match):
            name = match.group(0)
            known = name in places and name not in own
            return f'<a href="#{name}">{name}</a>' if known else name
        text = re.sub(r"\b(?:luna|LUNA)_\w+", one, html.escape(text, quote=False))
        text = CITED.sub(lambda m: f'<a href="#equation{m.group(1)}">{m.group(0)}</a>', text)
        return re.sub(r"&gt;&gt;(\w+)", lambda m: f'<a href="#{m[1]}">{m[0]}</a>' if m[1] in tags else m[0], text)
    return link


def prose(text, link, own=()):
    """Paragraphs of a comment; what is indented or set in columns stays as it is."""
    out = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if re.search(r"^ {2,}\S|\S {3,}\S", block, re.M):
            out.append(f'<pre class="text">{link(block, own)}</pre>')
        else:
            out.append(f"<p>{link(' '.join(block.split()), own)}</p>")
    return "".join(out)


def unlinked(text):
    """The text of Markdown with the words of its links alone."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def quotes(blocks):
    """The files examples/1_*.c and so on that no block of README and the guide quotes to the letter, their opening
    comment apart."""
    files = sorted(glob.glob(os.path.join(EXAMPLES, "[0-9]_*.c")))
    texts = [re.sub(r"\A/\*.*?\*/\n", "", open(file, encoding="utf-8").read(), flags=re.S) for file in files]
    wrong = [file for file, text in zip(files, texts) if text not in blocks]
    return [f"examples/{os.path.basename(file)} is not what README or the guide quotes" for file in wrong]


def main(header, readme, target, guide=os.path.join(EXAMPLES, "guide.md")):
    source = open(header, encoding="utf-8").read()
    manual = strip_comment(source[:source.index("*/") + 2])
    public = source[source.index("#define LUNA_H\n"):source.index("   2. Implementation\n   ====")]
    version = re.search(r'LUNA_VERSION "(.*?)"', source).group(1)
    chapters = read_chapters(public[:public.rindex("/*")])
    cited, entries = {n: [] for n in EQUATIONS}, 0
    places = {name for _, _, _, items in chapters for _, code in items for name in declared(code)}
    link = make_linker(places, {tag for tag, *_ in chapters})
    body, marked = [], set()
    for tag, title, text, items in chapters:
        body.append(f'<div class="chapter"><h2 id="{tag}">{html.escape(tag)}</h2>')
        body.append((f"<p><b>{link(title)}</b></p>" if title else "") + (prose(text, link) if text.strip() else ""))
        for comment, code in items:
            own = declared(code)
            for match in CITED.finditer(comment + code):
                first, last = int(match.group(1)), int(match.group(3) or match.group(1))
                stems = tuple({x.removesuffix("_config") for x in own} & places)
                kin = [x for x in sorted(places) if x.startswith("luna_") and (x in own or x.startswith(stems))]
                for n in range(first, last + 1) if match.group(2) == "-" else (first, last):
                    cited[n] += [x for x in kin if x not in cited[n]]
            entries += 1
            marks = "".join(f'<a id="{name}"></a>' for name in own if name not in marked)
            marked.update(own)
            body.append(f'<section class="entry">{marks}{prose(comment, link, own) if comment else ""}'
                        f"<pre>{link(code, own)}</pre></section>")
        body.append("</div>")
    rows = "".join(f'<tr id="equation{n}"><td>({n})</td><td>{name}<br><code>{html.escape(formula)}</code></td><td>'
                   f"{', '.join(link(x) for x in cited[n])}</td></tr>" for n, (name, formula) in EQUATIONS.items())
    sections = "".join(f'<section class="entry"><pre class="text">{link(text)}</pre></section>'
                       for text in re.split(r"\n\n(?=[A-Z][A-Z ,:]+(?:\n|, ))", manual))
    pages = open(readme, encoding="utf-8").read() + "\n" + open(guide, encoding="utf-8").read()
    blocks = re.findall(r"^```c\n(.*?)^```", pages, re.S | re.M)
    programs = re.findall(r"((?:^(?!```|#|\|)[^\n]+\n)+)\n```c\n(.*?)^```", pages, re.S | re.M)
    programs = [(text, code) for text, code in programs if "int main(" in code]
    examples = "".join(f'<section class="entry"><p>{html.escape(unlinked(" ".join(text.split())))}</p>'
                       f"<pre>{link(code)}</pre></section>" for text, code in programs)
    nav = "".join(f'<a href="#{tag}">{tag}</a>' for tag, *_ in chapters)
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>luna.h {version}: reference</title><style>{STYLE}</style>
<nav><input type="search" placeholder="search ( / )" aria-label="search"><div id="count"></div>
<a href="#manual">manual</a><a href="#equations">equations</a><a href="#programs">programs</a>{nav}</nav>
<main><h1>luna.h {version}</h1><div class="chapter"><h2 id="manual">manual</h2>{sections}</div>
<div class="chapter"><h2 id="equations">equations</h2><section class="entry"><p>Of arXiv 2106.01540v2, and what computes
them.</p><table><tr><th></th><th>equation</th><th>declarations</th></tr>{rows}</table></section></div>
{''.join(body)}<div class="chapter"><h2 id="programs">programs</h2>{examples}</div></main>
<script>{SCRIPT}</script></html>
"""
    open(target, "w", encoding="utf-8").write(page)
    missing = sorted(set(re.findall(r"^LUNA_API [^;=]*?\b(luna_\w+)\(", public, re.M)) - places)
    empty = [n for n in EQUATIONS if not cited[n]]
    wrong = [f"{name} has no entry" for name in missing] + [f"equation {n} is nobody's" for n in empty]
    wrong += quotes(blocks)
    wrong += [f"no sentence stands before: {block[:80]}" for block in blocks
              if "int main(" in block and block not in [code for _, code in programs]]
    for problem in wrong:
        print(f"docs: {problem}")
    print(f"{target}: {len(chapters)} chapters, {entries} entries, {len(places)} names, {len(programs)} programs")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
