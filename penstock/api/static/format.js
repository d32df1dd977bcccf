// Numbers and times as text.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => grouped.format(value);
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

export function rate(value) {
  return value === null ? "–" : value >= 100 ? grouped.format(value) : value.toFixed(1);
}

export function seconds(value) {
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : duration(value);
}

/** Of a length of time, its two greatest units. */
export function duration(value) {
  const whole = Math.max(0, Math.floor(value));
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

export function bytes(value) {
  if (value < 1024) return `${value} B`;
  return value < 1 << 20 ? `${(value / 1024).toFixed(1)} kB` : `${(value / (1 << 20)).toFixed(1)} MB`;
}

export const timeOfDay = (date) => date.toTimeString().slice(0, 8);
