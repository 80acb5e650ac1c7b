// Text that a model wrote, as parts that can be shown safely: what would be invisible, or would reorder what stands
// beside it, becomes a mark. Pure: no document.

const ODD = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Cn}\p{Zl}\p{Zp}\p{Zs}\uFFFD\u115F\u1160\u3164\uFFA0]/u;
const NAMED = {
  " ": ["·", "space"],
  "\n": ["\\n", "line feed"],
  "\r": ["\\r", "carriage return"],
  "\t": ["\\t", "tab"],
  "\ufffd": ["\ufffd", "bytes that are no whole character"],
};

function code(char) {
  return `U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

function split(text, plain) {
  const parts = [];
  let run = "";
  const flush = () => {
    if (run) parts.push({ text: run });
    run = "";
  };
  for (const char of text) {
    if (!ODD.test(char) || plain.has(char)) {
      run += char;
      continue;
    }
    flush();
    const [mark, name] = NAMED[char] ?? [code(char), "invisible character"];
    parts.push({ mark, name, char });
  }
  flush();
  return parts;
}

const FLOWING = new Set([" ", "\n", "\t"]);

/** Running text as parts: {text}, or {mark, name, char} for a character that cannot be seen. Spaces, tabs and line
 * feeds stay what they are. */
export function runningText(text) {
  return split(text, FLOWING);
}

/** One token as parts: its spaces and line feeds are marks too. */
export function tokenText(text) {
  if (text === "") return [{ mark: "empty", name: "a token without text" }];
  const whole = /^\p{M}/u.test(text) ? `\u25cc${text}` : text; // a combining mark needs something to stand on
  return split(whole, new Set());
}

/** The last `limit` characters, or the first; a character is never cut in two. */
export function clip(text, limit, end = "last") {
  const chars = [...text];
  if (chars.length <= limit) return text;
  return end === "last" ? `…${chars.slice(-limit).join("")}` : `${chars.slice(0, limit).join("")}…`;
}

/** Text for a label or hover of Plotly, which takes some tags and entities for markup. */
export function plotText(text) {
  const seen = runningText(text.replaceAll(/[\n\t]/g, " ")).map((part) => part.text ?? part.mark);
  return seen.join("").replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
