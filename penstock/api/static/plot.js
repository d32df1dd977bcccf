// A plot of one or two lines over the last minutes, as SVG.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 120;
/** Seconds from the left to the right edge. */
const SPAN_S = 120;

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

export class Plot {
  /** `lines`: names of the lines; `format`: of a value; `most`: the least value at the upper edge, or a fixed one. */
  constructor(title, lines, format, { most = 1, fixed = false } = {}) {
    this.format = format;
    this.most = most;
    this.fixed = fixed;
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    for (const share of [0.25, 0.5, 0.75]) {
      this.svg.append(shape("line", { x1: 0, x2: WIDTH, y1: HEIGHT * share, y2: HEIGHT * share, class: "grid" }));
    }
    this.area = shape("path", { class: "area" });
    this.lines = lines.map((_, index) => shape("path", { class: `line line-${index}` }));
    this.svg.append(this.area, ...this.lines);
    this.node = document.createElement("figure");
    this.node.className = "plot";
    this.caption = document.createElement("figcaption");
    this.names = document.createElement("span");
    this.names.textContent = title;
    this.values = lines.map((name, index) => {
      const value = document.createElement("span");
      value.className = `value line-${index}`;
      value.dataset.name = name;
      return value;
    });
    this.upper = document.createElement("span");
    this.upper.className = "upper";
    this.caption.append(this.names, ...this.values);
    this.title = title;
    this.node.append(this.caption, this.upper, this.svg);
  }

  /** `points`: {time, values} with a value per line, null where there is none; the last one is at the right edge. */
  show(points) {
    const now = points.at(-1)?.time ?? 0;
    const seen = points.filter((point) => point.time >= now - SPAN_S);
    const greatest = Math.max(0, ...seen.flatMap((point) => point.values.map((value) => value ?? 0)));
    const upper = this.fixed ? this.most : niceAbove(Math.max(this.most, greatest));
    const x = (time) => WIDTH - ((now - time) / SPAN_S) * WIDTH;
    const y = (value) => HEIGHT - 2 - (value / upper) * (HEIGHT - 6);
    this.lines.forEach((line, index) => {
      const drawn = seen.filter((point) => point.values[index] !== null);
      const path = drawn.map((point) => `${x(point.time).toFixed(1)},${y(point.values[index]).toFixed(1)}`).join("L");
      line.setAttribute("d", path && `M${path}`);
      if (index === 0) {
        const [first, last] = [drawn[0], drawn.at(-1)];
        this.area.setAttribute("d", path && `M${x(first.time)},${HEIGHT}L${path}L${x(last.time)},${HEIGHT}Z`);
      }
      const latest = points.at(-1)?.values[index] ?? null;
      const name = this.values[index].dataset.name;
      this.values[index].textContent = `${name ? `${name} ` : ""}${latest === null ? "–" : this.format(latest)}`;
    });
    this.upper.textContent = this.format(upper);
    const texts = this.values.map((value) => value.textContent).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${texts}`);
  }
}

/** The least of 1, 2 and 5 times a power of ten that is not below a value. */
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((bound) => bound >= value * 0.999);
}
