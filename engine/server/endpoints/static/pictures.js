// Pictures of the next message: dropped, pasted or chosen, shown as thumbnails, sent as data URLs.

const MAX_SIDE = 2048;
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

/** Collect pictures for the message box, once `allow()` has said that the model reads them; `empty()` returns
 * their data URLs and empties the tray. */
export function collectPictures(form, field, chooser, tray, tell) {
  const urls = [];
  let areRead = false;

  async function add(files) {
    if (!areRead) {
      if (files.length) tell("This model reads text alone, no pictures.");
      return;
    }
    for (const file of files) {
      if (!file.type.startsWith("image/")) continue;
      try {
        urls.push(await dataUrl(file));
        tell("");
      } catch {
        tell(`${file.name || "the picture"} cannot be read as a picture`);
      }
    }
    show();
  }

  function show() {
    tray.replaceChildren(...urls.map((url, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "thumb";
      button.ariaLabel = `Remove picture ${index + 1}`;
      button.append(thumbnail(url));
      button.onclick = () => {
        urls.splice(index, 1);
        show();
        field.focus();
      };
      return button;
    }));
    tray.hidden = urls.length === 0;
  }

  field.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    add(files);
  });
  // On the whole page, because a picture that misses the box would replace the page.
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    if (areRead) form.classList.add("dropping");
  });
  for (const name of ["dragleave", "drop"]) {
    document.addEventListener(name, () => form.classList.remove("dropping"));
  }
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    add([...(event.dataTransfer?.files ?? [])]);
  });
  chooser.onchange = () => {
    add([...chooser.files]);
    chooser.value = "";
  };

  return {
    allow() {
      areRead = true;
    },
    empty() {
      const taken = urls.splice(0);
      show();
      return taken;
    },
    get count() {
      return urls.length;
    },
  };
}

/** A picture element for a data URL. */
export function thumbnail(url) {
  const image = document.createElement("img");
  image.src = url;
  image.alt = "picture";
  return image;
}

/** The file as a data URL, made smaller where it is larger than vision models read. */
async function dataUrl(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && TYPES.includes(file.type)) {
    bitmap.close();
    return read(file);
  }
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
