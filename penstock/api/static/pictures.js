// Pictures of the next message: pasted, dropped or chosen, shown small, and scaled down if they are very large.

import { byId, make, notify } from "./dom.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_PIXELS = 20_000_000;
const MAX_BYTES = 8 << 20;
const QUALITY = 0.9;
/** Pixels of a side of a small picture, on a screen with two per point. */
const SMALL = 192;

const list = byId("pictures");
const choose = byId("picture-choose");
const file = byId("picture-file");
const note = byId("picture-note");
/** {name, url} of each. */
let waiting = [];
/** What becomes of files that were added. */
let reading = Promise.resolve();
let offered = false;

export function startPictures() {
  choose.addEventListener("click", () => file.click());
  file.addEventListener("change", () => {
    add([...file.files]);
    file.value = "";
  });
  byId("prompt").addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!offered || !files.length) return;
    event.preventDefault();
    add(files);
  });
  const target = document.querySelector(".conversation");
  target.addEventListener("dragover", (event) => {
    if (offered && event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  target.addEventListener("drop", (event) => {
    if (!offered || !event.dataTransfer.files.length) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
}

/** Offers pictures, if the model sees them. */
export function offerPictures(sees) {
  offered = sees;
  choose.hidden = !sees;
  if (!sees) show([]);
}

/** The pictures of the message that is sent now, once they have been read; the next one has none of them. */
export async function takePictures() {
  await reading;
  const taken = waiting;
  show([]);
  return taken;
}

function add(files) {
  notify(note, "");
  reading = files.reduce((before, each) => before.then(() => addOne(each)), reading);
}

async function addOne(given) {
  try {
    const picture = { name: given.name || "image", url: await dataUrl(await withinBounds(given)) };
    show([...waiting, picture]);
    notify(note, `Added: ${picture.name}`);
  } catch {
    notify(note, `${given.name}: not an image that this browser reads (${KINDS.map((kind) => kind.slice(6)).join(", ")}).`);
  }
}

/** The file, or a smaller picture of it. Throws for what is no picture. */
async function withinBounds(given) {
  const bitmap = await createImageBitmap(given);
  let scale = Math.min(1, Math.sqrt(MAX_PIXELS / (bitmap.width * bitmap.height)));
  let made = given;
  while (scale < 1 || made.size > MAX_BYTES || !KINDS.includes(made.type)) {
    const canvas = draw(make("canvas"), bitmap, scale);
    made = await new Promise((done) => { canvas.toBlob(done, "image/jpeg", QUALITY); });
    if (made.size <= MAX_BYTES) break;
    scale *= 0.7;
  }
  bitmap.close();
  return made;
}

function draw(canvas, bitmap, scale) {
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

const dataUrl = (blob) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(blob);
});

/** A small picture, drawn: the page's policy loads no image from anywhere. */
export function smallPicture({ name, url }) {
  const canvas = make("canvas", { class: "small", role: "img", "aria-label": `Image: ${name}`, title: name, width: 1, height: 1 });
  if (url) drawSmall(canvas, url).catch(() => { canvas.title = `${name}: it cannot be shown`; });
  return canvas;
}

async function drawSmall(canvas, url) {
  const bytes = Uint8Array.from(atob(url.slice(url.indexOf(",") + 1)), (letter) => letter.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes]));
  draw(canvas, bitmap, Math.min(1, SMALL / Math.max(bitmap.width, bitmap.height)));
  bitmap.close();
}

function show(pictures) {
  waiting = pictures;
  list.hidden = !pictures.length;
  list.replaceChildren(...pictures.map((picture) => {
    const remove = make("button", { type: "button", class: "quiet", text: "Remove", "aria-label": `Remove ${picture.name}` });
    remove.addEventListener("click", () => {
      show(waiting.filter((each) => each !== picture));
      notify(note, `Removed: ${picture.name}`);
      byId("prompt").focus();
    });
    return make("li", {}, smallPicture(picture), remove);
  }));
  if (!pictures.length) notify(note, "");
}
