// Colours code: comments, strings, numbers, keywords and names, by families of languages. It is a guess of each sign's
// meaning, never more than spans around the text.

import { make } from "./dom.js";

/** Longer code has no colours: each part of it is an element. */
const MAX_CHARACTERS = 50_000;
const MAX_STRING = 2000;

const words = (text) => new Set(text.split(/\s+/));
const HASH = "#.*";
const SLASHES = String.raw`//.*|/\*[^]*?(?:\*/|$)`;
const DOUBLE = String.raw`"(?:[^"\\\n]|\\[^]){0,${MAX_STRING}}"?`;
const SINGLE = String.raw`'(?:[^'\\\n]|\\[^]){0,${MAX_STRING}}'?`;
const LONG = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`;
const BACKTICKS = "`(?:[^`\\\\]|\\\\[^]){0,20000}`?";
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][-+]?\d+)?)[a-zA-Z]{0,4}\b`;
const NAME = String.raw`[A-Za-z_$][\w$]*`;

/** A family: what its comments and strings look like, its keywords, names before a bracket, and further signs by class. */
function family({ comment = "", string, keywords = "", more = {}, name = NAME, flags = "" }) {
  const parts = { comment, ...more, string, number: NUMBER, name };
  const found = Object.entries(parts).filter(([, pattern]) => pattern);
  return {
    kinds: found.map(([kind]) => kind),
    pattern: new RegExp(found.map(([, pattern]) => `(${pattern})`).join("|"), `g${flags}`),
    keywords: words(keywords),
    anyCase: flags.includes("i"),
  };
}

const C_WORDS = `auto break case char class const constexpr continue default delete do double else enum explicit extern false final
  float for friend goto if inline int long namespace new noexcept nullptr operator private protected public return short signed
  sizeof static struct switch template this throw true try typedef typename union unsigned using virtual void volatile while
  abstract async await bool boolean byte catch event finally foreach get implements import in instanceof interface internal is
  let null object out override package params readonly ref sealed set string super synchronized throws transient val var when fun
  func guard extension protocol where yield record def`;

const FAMILIES = {
  python: family({
    comment: HASH, string: `\\b[rbfuRBFU]{0,2}(?:${LONG}|${DOUBLE}|${SINGLE})|${LONG}|${DOUBLE}|${SINGLE}`, more: { meta: "@[\\w.]+" },
    keywords: `and as assert async await break case class continue def del elif else except False finally for from global if import
      in is lambda match None nonlocal not or pass raise return True try type while with yield self`,
  }),
  js: family({
    comment: SLASHES, string: `${BACKTICKS}|${DOUBLE}|${SINGLE}`,
    keywords: `abstract any as async await boolean break case catch class const continue debugger declare default delete do else enum
      export extends false finally for from function get if implements import in instanceof interface keyof let namespace never new
      null number of private protected public readonly return satisfies set static string super switch this throw true try type
      typeof undefined unknown var void while with yield`,
  }),
  json: family({ comment: SLASHES, string: DOUBLE, more: { meta: String.raw`"(?:[^"\\\n]|\\.){0,200}"(?=\s{0,9}:)` }, keywords: "true false null" }),
  sh: family({
    comment: String.raw`(?<![\w$\{])#.*`, string: String.raw`"(?:[^"\\]|\\[^]){0,${MAX_STRING}}"?|'[^']{0,${MAX_STRING}}'?`,
    more: { meta: String.raw`\$(?:\{[^}\n]{0,200}\}|\w+|[?@#*!$-])|(?<=\s)--?[A-Za-z][\w-]*` }, name: String.raw`[A-Za-z_][\w.-]*`,
    keywords: `if then else elif fi for in do done while until case esac function select return exit export local readonly set unset
      source alias cd echo sudo eval exec trap shift test true false`,
  }),
  yaml: family({
    comment: String.raw`(?<![^\s])#.*`, string: `${DOUBLE}|${SINGLE}`, more: { meta: String.raw`(?=[\w./-])(?<=^[ \t]*(?:- +)?)[\w./-]{1,100}(?=[ \t]{0,9}(?::(?:\s|$)|=))|[&*!][\w-]+` },
    keywords: "true false null yes no on off", name: "[A-Za-z_][\\w.-]*", flags: "m",
  }),
  sql: family({
    comment: String.raw`--.*|/\*[^]*?(?:\*/|$)`, string: `'(?:[^']|''){0,${MAX_STRING}}'?|"[^"]{0,${MAX_STRING}}"?`, flags: "i",
    keywords: `add all alter and as asc begin between bigint boolean by case cast char column commit constraint create cross date
      default delete desc distinct drop else end exists explain false foreign from full group having if in index inner insert int
      integer intersect into is join key left like limit not null numeric offset on or order outer over partition primary references
      returning right rollback row rows select set table text then timestamp true truncate union unique update using values varchar
      view when where with`,
  }),
  html: family({
    comment: "<!--[^]*?(?:-->|$)", string: `"[^"<]{0,${MAX_STRING}}"|'[^'<]{0,${MAX_STRING}}'`,
    more: { keyword: String.raw`</?[A-Za-z][\w:-]*|/?>|<[!?][\w]+`, meta: String.raw`[\w:@.-]{1,100}(?==)|&#?\w{1,30};` }, name: "[A-Za-z]\\w*",
  }),
  css: family({
    comment: SLASHES, string: `${DOUBLE}|${SINGLE}`, more: { meta: String.raw`[-\w]{1,100}(?=\s{0,9}:)|@[\w-]+|#[\da-fA-F]{3,8}\b` }, name: "[.#]?[A-Za-z_-][\\w-]*",
  }),
  c: family({ comment: SLASHES, string: `${LONG}|${DOUBLE}|${SINGLE}`, more: { meta: String.raw`#[ \t]{0,9}(?:include|define|undef|if|ifdef|ifndef|elif|else|endif|pragma|error)\b|@\w+` }, keywords: C_WORDS }),
  rust: family({
    comment: SLASHES, string: String.raw`b?r#*"[^]*?"#*|b?${DOUBLE}|b?'(?:[^'\\\n]|\\[^'\n]{1,9})'`, more: { meta: String.raw`#!?\[[^\]\n]{0,200}\]|'[a-z_]\w{0,40}\b(?!')|\b[a-z_]\w{0,40}!` },
    keywords: `as async await bool break char const continue crate dyn else enum extern f32 f64 false fn for i16 i32 i64 i8 if impl in
      isize let loop match mod move mut pub ref return self Self static str struct super trait true type u16 u32 u64 u8 unsafe use
      usize where while`,
  }),
  go: family({
    comment: SLASHES, string: `${BACKTICKS}|${DOUBLE}|${SINGLE}`,
    keywords: `any bool break byte case chan const continue default defer else error fallthrough false float32 float64 for func go goto
      if import int int32 int64 interface iota map nil package range return rune select string struct switch true type uint uint8
      uint32 uint64 var`,
  }),
};

const NAMES = {
  python: "python py python3 pycon ipython", js: "js javascript jsx ts typescript tsx mjs cjs node", json: "json jsonc json5 jsonl ndjson",
  sh: "sh bash zsh shell console terminal fish dockerfile docker makefile make powershell ps1", yaml: "yaml yml toml ini conf",
  sql: "sql mysql postgresql postgres sqlite plsql", html: "html xml svg xhtml vue svelte jinja", css: "css scss less",
  c: "c h cpp c++ cc cxx hpp java kotlin kt cs csharp c# swift scala php dart objc cuda glsl proto groovy", rust: "rust rs", go: "go golang",
};
const FAMILY_OF = new Map(Object.entries(NAMES).flatMap(([name, all]) => all.split(" ").map((each) => [each, FAMILIES[name]])));

/** Code as texts and elements. */
export function highlighted(text, language) {
  const name = language.toLowerCase().replace(/^\{?\.?|\}$/g, "");
  if (text.length > MAX_CHARACTERS) return [text];
  if (name === "diff" || name === "patch") return diff(text);
  const found = FAMILY_OF.get(name);
  return found ? coloured(text, found) : [text];
}

function coloured(text, { kinds, pattern, keywords, anyCase }) {
  const nodes = [];
  let shown = 0;
  const nameKind = (name, behind) => (keywords.has(anyCase ? name.toLowerCase() : name) ? "keyword" : text[behind] === "(" ? "call" : null);
  for (const found of text.matchAll(pattern)) {
    const [whole] = found;
    const behind = found.index + whole.length;
    const part = kinds[found.slice(1).findIndex((group) => group !== undefined)];
    const kind = part === "name" ? nameKind(whole, behind) : part;
    if (!kind || !whole) continue;
    if (found.index > shown) nodes.push(text.slice(shown, found.index));
    nodes.push(make("span", { class: `hl-${kind}`, text: whole }));
    shown = behind;
  }
  if (shown < text.length) nodes.push(text.slice(shown));
  return nodes;
}

function diff(text) {
  return text.split(/(?<=\n)/).map((line) => {
    const kind = /^(?:@@|diff |index |---|\+\+\+)/.test(line) ? "meta" : { "+": "added", "-": "removed" }[line[0]];
    return kind ? make("span", { class: `hl-${kind}`, text: line }) : line;
  });
}
