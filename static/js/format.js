// Numbers, units and words, one form each. Pure: no document, so that node can test it.

export const NONE = "–";
const GAP = "\u00a0"; // no-break space between a number and its unit

const grouped = new Map();
function plain(value, digits) {
  if (!grouped.has(digits)) {
    grouped.set(digits, new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  }
  return grouped.get(digits).format(value).replace("-", "−");
}

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** 12,345.6 with a fixed count of decimals. */
export function number(value, digits = 0) {
  return isNumber(value) ? plain(value, digits) : NONE;
}

/** About three significant digits: 0.061, 1.23, 12.3, 123, 1,234. */
export function significant(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 100) return plain(value, 0);
  if (size >= 10) return plain(value, 1);
  if (size >= 1) return plain(value, 2);
  return plain(value, Math.min(6, 2 - Math.floor(Math.log10(size))));
}

/** A speedup: "2.31×". */
export function ratio(value) {
  return isNumber(value) ? `${plain(value, 2)}×` : NONE;
}

/** A 95 % interval of a speedup: "2.26 to 2.37×". */
export function interval(low, high) {
  return isNumber(low) && isNumber(high) ? `${plain(low, 2)} to ${plain(high, 2)}×` : "";
}

/** A ratio over the incumbent as a change: 1.031 is "+3.1 %". */
export function change(value) {
  if (!isNumber(value)) return NONE;
  const percent = (value - 1) * 100;
  const text = plain(percent, 1);
  const rounded = text === "−0.0" ? "0.0" : text;
  return `${percent > 0 && rounded !== "0.0" ? "+" : ""}${rounded}${GAP}%`;
}

/** A share of one: 0.81 is "81 %". */
export function percent(share, digits = 0) {
  return isNumber(share) ? `${plain(share * 100, digits)}${GAP}%` : NONE;
}

export function milliseconds(value) {
  return isNumber(value) ? `${significant(value)}${GAP}ms` : NONE;
}

export function tokensPerSecond(value) {
  return isNumber(value) ? `${significant(value)}${GAP}tok/s` : NONE;
}

/** Seconds as people say them: "42 s", "7 min 05 s", "1 h 12 min". */
export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole}${GAP}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}${GAP}min ${String(whole % 60).padStart(2, "0")}${GAP}s`;
  return `${Math.floor(whole / 3600)}${GAP}h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")}${GAP}min`;
}

/** A measured span of time: "184 ms", "1.23 s". */
export function elapsed(seconds) {
  if (!isNumber(seconds)) return NONE;
  return seconds < 1 ? milliseconds(seconds * 1000) : `${significant(seconds)}${GAP}s`;
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = value;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? plain(size, 0) : significant(size)}${GAP}${units[unit]}`;
}

/** Seconds since the epoch as the local time of day, 24 hours. */
export function clock(seconds) {
  if (!isNumber(seconds)) return NONE;
  return new Date(seconds * 1000).toLocaleTimeString("en-GB", { hour12: false });
}

export function plural(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}

/** A lever's value in a word. */
export function leverValue(value) {
  if (value === null || value === undefined) return NONE;
  if (value === true) return "on";
  if (value === false) return "off";
  return String(value);
}

/** The words, tone (colour) and shape of each verdict; a verdict is never told by colour alone. */
export const VERDICTS = {
  accepted: { word: "Accepted", tone: "ok", symbol: "circle" },
  slower: { word: "Slower", tone: "idle", symbol: "circle-open" },
  lossy: { word: "Lossy", tone: "bad", symbol: "x" },
  crashed: { word: "Crashed", tone: "bad", symbol: "triangle-down" },
  "timed out": { word: "Timed out", tone: "warn", symbol: "square-open" },
  invalid: { word: "Invalid", tone: "warn", symbol: "diamond-open" },
};

export function verdict(name) {
  return VERDICTS[name] ?? { word: name || "Unknown", tone: "idle", symbol: "circle-open" };
}

/** The word and tone of a search's status. */
export const STATUSES = {
  queued: { word: "Queued", tone: "idle" },
  running: { word: "Running", tone: "run" },
  paused: { word: "Paused", tone: "warn" },
  cancelling: { word: "Cancelling", tone: "warn" },
  finished: { word: "Finished", tone: "ok" },
  cancelled: { word: "Cancelled", tone: "idle" },
  failed: { word: "Failed", tone: "bad" },
};

export function status(name) {
  return STATUSES[name] ?? { word: name || "Unknown", tone: "idle" };
}

/**
 * Rows as CSV (RFC 4180). Text that a spreadsheet would run as a formula is defused with a leading apostrophe;
 * numbers stay numbers.
 */
export function csv(header, rows) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    let text = String(value);
    if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return `${[header, ...rows].map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;
}

/** A name that is safe in a file system: "search-42-gaps". */
export function fileName(...parts) {
  return parts
    .map((part) =>
      String(part)
        .toLowerCase()
        .replace(/[^a-z0-9.]+/g, "-")
        .replace(/^-|-$/g, ""),
    )
    .join("-");
}
