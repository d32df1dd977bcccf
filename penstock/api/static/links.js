// The parts of Markdown's links: names, targets, titles and the definitions of them; and characters written by name.

/** Longer targets and titles make no link: with the limit, links without an end take no more time than others. */
const MAX_PART = 2000;
const ANGLED = /<((?:[^<>\\\n]|\\.){0,2000})>/y;
const TITLES = [/"((?:[^"\\]|\\[^]){0,2000})"/y, /'((?:[^'\\]|\\[^]){0,2000})'/y, /\(((?:[^()\\]|\\[^]){0,2000})\)/y];
const LABEL = /\[((?:[^[\]\\]|\\[^]){1,999})\]/y;
const SPACE = /[ \t]*(?:\n[ \t]*)?/y;
const PLAIN = /\\([!-/:-@[-`{-~])|&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([A-Za-z][A-Za-z\d]{1,31}));/g;

/** A pattern's match at a place of a text. */
export function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

const behindSpace = (text, at) => at + matchAt(SPACE, text, at)[0].length;

/** The name of a link for comparison: in any case, with any white space. */
export const labelKey = (label) => label.trim().replace(/\s+/g, " ").toLowerCase().toUpperCase();

/** The name in brackets at a place, and the place behind them. */
export function labelAt(text, at) {
  const found = matchAt(LABEL, text, at);
  return found?.[1].trim() ? { label: found[1], end: at + found[0].length } : null;
}

function targetAt(text, at) {
  if (text[at] === "<") {
    const found = matchAt(ANGLED, text, at);
    return found && { target: plainOf(found[1]), end: at + found[0].length };
  }
  let deep = 0;
  let end = at;
  for (; end < text.length && end - at <= MAX_PART; end += 1) {
    const sign = text[end];
    if (sign === "\\" && /[!-/:-@[-`{-~]/.test(text[end + 1] ?? "")) end += 1;
    else if (sign === "(" && (deep += 1) > 32) return null;
    else if (sign === ")" && (deep -= 1) < 0) break;
    else if (sign <= " " || sign === "\x7f") break;
  }
  return deep > 0 || end - at > MAX_PART ? null : { target: plainOf(text.slice(at, end)), end };
}

function titleAt(text, at) {
  const pattern = TITLES[['"', "'", "("].indexOf(text[at])];
  const found = pattern && matchAt(pattern, text, at);
  return found && !/\n[ \t]*\n/.test(found[1]) ? { title: plainOf(found[1]), end: at + found[0].length } : null;
}

/** The target in parentheses at a place, the one behind a link's text, with its title. */
export function inlineTargetAt(text, at) {
  if (text[at] !== "(") return null;
  const found = targetAt(text, behindSpace(text, at + 1));
  if (!found) return null;
  let end = behindSpace(text, found.end);
  const titled = end > found.end ? titleAt(text, end) : null;
  if (titled) end = behindSpace(text, titled.end);
  return text[end] === ")" ? { target: found.target, title: titled?.title ?? "", end: end + 1 } : null;
}

/** The definition of a link at the start of a text. */
export function definitionAt(text) {
  const named = labelAt(text, 0);
  if (!named || text[named.end] !== ":") return null;
  const start = behindSpace(text, named.end + 1);
  const found = start < text.length ? targetAt(text, start) : null;
  if (!found || found.end === start) return null;
  const from = behindSpace(text, found.end);
  const titled = from > found.end ? titleAt(text, from) : null;
  const end = titled ? lineEnd(text, titled.end) : null;
  if (end !== null) return { label: named.label, target: found.target, title: titled.title, end };
  const bare = lineEnd(text, found.end);
  return bare === null ? null : { label: named.label, target: found.target, title: "", end: bare };
}

/** The place behind the end of the line, if nothing else is left of it. */
function lineEnd(text, at) {
  const [space] = matchAt(/[ \t]*/y, text, at);
  const end = at + space.length;
  if (end >= text.length) return end;
  return text[end] === "\n" ? end + 1 : null;
}

/** A text with its escaped signs and names of characters as these. */
export const plainOf = (text) => text.replace(PLAIN, (whole, sign, decimal, hex, name) => sign ?? characterOf(whole, decimal, hex, name));

/** The character of &#decimal;, &#xhex; or &name;, all of it as it is for a name that is not known. */
export function characterOf(whole, decimal, hex, name) {
  if (name) return NAMED.get(name) ?? whole;
  const code = decimal ? Number(decimal) : parseInt(hex, 16);
  return code && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000) ? String.fromCodePoint(code) : "\ufffd";
}

/** Names of the characters that models write; HTML knows two thousand more. */
const LATIN = `nbsp iexcl cent pound curren yen brvbar sect uml copy ordf laquo not shy reg macr deg plusmn sup2 sup3 acute micro
  para middot cedil sup1 ordm raquo frac14 frac12 frac34 iquest Agrave Aacute Acirc Atilde Auml Aring AElig Ccedil Egrave Eacute
  Ecirc Euml Igrave Iacute Icirc Iuml ETH Ntilde Ograve Oacute Ocirc Otilde Ouml times Oslash Ugrave Uacute Ucirc Uuml Yacute
  THORN szlig agrave aacute acirc atilde auml aring aelig ccedil egrave eacute ecirc euml igrave iacute icirc iuml eth ntilde
  ograve oacute ocirc otilde ouml divide oslash ugrave uacute ucirc uuml yacute thorn yuml`;
const OTHERS = `amp & lt < gt > quot " apos ' hellip … ndash – mdash — lsquo ‘ rsquo ’ ldquo “ rdquo ” bull • larr ← uarr ↑ rarr →
  darr ↓ harr ↔ rArr ⇒ lArr ⇐ hArr ⇔ euro € trade ™ minus − infin ∞ ne ≠ le ≤ ge ≥ asymp ≈ equiv ≡ sum ∑ prod ∏ radic √ int ∫
  part ∂ nabla ∇ isin ∈ notin ∉ sub ⊂ sup ⊃ cap ∩ cup ∪ and ∧ or ∨ forall ∀ exist ∃ empty ∅ alpha α beta β gamma γ delta δ
  epsilon ε theta θ lambda λ mu μ pi π rho ρ sigma σ tau τ phi φ omega ω Delta Δ Sigma Σ Omega Ω check ✓ lsaquo ‹ rsaquo ›`;
const pairs = OTHERS.split(/\s+/);
const NAMED = new Map([
  ...LATIN.split(/\s+/).map((name, index) => [name, String.fromCharCode(160 + index)]),
  ...pairs.flatMap((name, index) => (index % 2 ? [] : [[name, pairs[index + 1]]])),
]);
