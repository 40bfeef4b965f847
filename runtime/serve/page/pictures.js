// Pictures that go with a message: read from files, made smaller where they are large, and shown.

import { action, element } from "./elements.js";

export const MOST = 8; // pictures of a message
const MOST_FILE = 50e6; // bytes of a file that is read at all
const KEPT_FILE = 4e6; // bytes up to which a file is sent as it is
const KEPT_PIXELS = 2 ** 23; // and pixels
const DRAWN_PIXELS = 2 ** 21; // of a larger one: the most that the server's model sees unasked
const QUALITY = 0.92; // of a JPEG
const KEPT_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
export const PICTURE = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}$/;

// A picture that cannot be sent; its message says why, and fits behind the file's name.
export class PictureError extends Error {}

// Files among what was pasted or dropped. Programs paste a picture of a text beside the text.
export function filesOf(transfer, pasted = false) {
  if (pasted && transfer?.getData("text/plain")) return [];
  return [...(transfer?.files ?? [])];
}

// The data URL of a picture file, upright and no larger than the server needs.
export async function readPicture(file) {
  const name = file.name || "The picture";
  if (file.type && !file.type.startsWith("image/"))
    throw new PictureError(`${name} is no picture.`);
  if (file.size > MOST_FILE) throw new PictureError(`${name} has over ${MOST_FILE / 1e6} MB.`);
  if (!file.size) throw new PictureError(`${name} is empty.`);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new PictureError(`${name} is no picture that this browser can read.`);
  }
  const pixels = bitmap.width * bitmap.height;
  const kept = KEPT_TYPES.includes(file.type) && file.size <= KEPT_FILE && pixels <= KEPT_PIXELS;
  const url = kept ? await urlOf(file) : drawn(bitmap, file.type === "image/png");
  bitmap.close();
  if (!PICTURE.test(url)) throw new PictureError(`${name} is too large for this browser.`);
  return url;
}

function urlOf(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new PictureError("The picture could not be read."));
    reader.readAsDataURL(blob);
  });
}

// The picture on white, smaller; as PNG, which keeps small writing sharp, if that is not too long.
function drawn(bitmap, sharp) {
  const shrink = Math.min(1, Math.sqrt(DRAWN_PIXELS / (bitmap.width * bitmap.height)));
  const size = { width: bitmap.width * shrink, height: bitmap.height * shrink };
  const canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(size.width));
  canvas.height = Math.max(1, Math.round(size.height));
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const png = sharp ? canvas.toDataURL("image/png") : "";
  return png && png.length <= KEPT_FILE ? png : canvas.toDataURL("image/jpeg", QUALITY);
}

// Pictures in a row; a click shows one large. With `remove(index)` each has a button for that.
export function pictureRow(urls, remove = null) {
  const row = element("div", { className: "pictures" });
  urls.forEach((src, index) => {
    const alt = `Picture ${index + 1}`;
    const image = element("img", { src, alt });
    const open = element("button", { type: "button", className: "thumb" }, image);
    open.addEventListener("click", () => enlarge(src, alt));
    const cell = element("span", { className: "picture" }, open);
    if (remove) {
      const button = action("×", () => remove(index));
      button.ariaLabel = `Remove picture ${index + 1}`;
      button.className = "remove";
      cell.append(button);
    }
    row.append(cell);
  });
  return row;
}

function enlarge(src, alt) {
  const viewer = document.getElementById("viewer");
  viewer.replaceChildren(element("img", { src, alt }));
  viewer.showModal();
}
