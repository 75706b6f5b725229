// What is wrong with a loaded page: a list of sentences. Run by tests/docs/browser.py in a frame
// that is as wide as the screen to be tried.
"use strict";

const LEAST_CONTRAST = 4.5; // WCAG 2.2, 1.4.3, for text of any size

const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const parsed = new Map();

// [red, green, blue, opacity] of any colour that CSS knows, each from 0 to 1.
function colour(text) {
  if (!parsed.has(text)) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    parsed.set(text, [...canvas.getImageData(0, 0, 1, 1).data].map((part) => part / 255));
  }
  return parsed.get(text);
}

function over(above, below) {
  return [0, 1, 2].map((i) => above[i] * above[3] + below[i] * (1 - above[3]));
}

// What is behind an element, its own background included.
function background(element, view) {
  const layers = [];
  for (let node = element; node; node = node.parentElement) {
    layers.push(colour(view.getComputedStyle(node).backgroundColor));
    if (layers.at(-1)[3] === 1) break;
  }
  return layers.reverse().reduce((below, above) => over(above, below), [1, 1, 1]);
}

function luminance(rgb) {
  const [r, g, b] = rgb.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(one, other) {
  const [light, dark] = [luminance(one), luminance(other)].sort((a, b) => b - a);
  return (light + 0.05) / (dark + 0.05);
}

function overflow(page) {
  const {scrollWidth, clientWidth} = page.documentElement;
  if (scrollWidth <= clientWidth) return [];
  const widest = [...page.body.querySelectorAll("*")]
    .filter((element) => element.getBoundingClientRect().right > clientWidth + 1)
    .map((element) => `${element.localName}.${element.className}`);
  return [`is ${scrollWidth} pixels wide on ${clientWidth}: ${widest.slice(0, 3).join(", ")}`];
}

function faint(page, view) {
  const found = new Set();
  const texts = page.createTreeWalker(page.body, view.NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    const text = texts.currentNode.data.trim();
    if (!text || element.closest("script, style, noscript, svg")) continue;
    if (!element.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue;
    const behind = background(element, view);
    const ink = over(colour(view.getComputedStyle(element).color), behind);
    const ratio = contrast(ink, behind);
    if (ratio < LEAST_CONTRAST) {
      found.add(`has contrast ${ratio.toFixed(2)} at ${element.localName}.${element.className}: ` +
                text.slice(0, 30));
    }
  }
  return [...found];
}

// The text of an SVG that is its own page, on the topmost shape behind it or on white.
function faintInPicture(frame) {
  const [page, view] = [frame.contentDocument, frame.contentWindow];
  const found = [];
  for (const text of page.querySelectorAll("text")) {
    const {left, top, width, height} = text.getBoundingClientRect();
    const shapes = page.elementsFromPoint(left + width / 2, top + height / 2)
      .filter((shape) => !shape.closest("text") && shape.matches("rect, path, circle, ellipse"))
      .map((shape) => shape.checkVisibility() && view.getComputedStyle(shape))
      .filter((style) => style && style.fill !== "none")
      .map((style) => [...colour(style.fill).slice(0, 3), style.fillOpacity * style.opacity]);
    const behind = shapes.reverse().reduce((below, above) => over(above, below), [1, 1, 1]);
    const ink = colour(view.getComputedStyle(text).fill);
    const ratio = contrast(over(ink, behind), behind);
    if (ratio < LEAST_CONTRAST) {
      found.push(`has contrast ${ratio.toFixed(2)}: ${text.textContent.slice(0, 30)}`);
    }
  }
  return found;
}

function unnamed(page) {
  return [...page.images]
    .filter((image) => !(image.getAttribute("alt") ?? "").trim())
    .map((image) => `has an image without a description: ${image.getAttribute("src")}`);
}

function unseen(page) {
  return [...page.images]
    .filter((image) => !image.naturalWidth)
    .map((image) => `has an image that does not load: ${image.getAttribute("src")}`);
}

// Headings start with one h1 and go down one level at a time.
function disordered(page) {
  const found = [];
  let last = 0;
  for (const heading of page.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const level = Number(heading.localName[1]);
    if (level > last + 1 || (level === 1) !== (last === 0)) {
      found.push(`has ${heading.localName} after h${last}: ${heading.textContent.slice(0, 30)}`);
    }
    last = level;
  }
  return last ? found : ["has no heading"];
}

function settled(view) {
  return new Promise((done) => view.requestAnimationFrame(() => view.setTimeout(done, 50)));
}

// Everything that is wrong with a frame's page, in the light and in the dark theme.
async function check(frame) {
  const page = frame.contentDocument;
  const found = [...overflow(page), ...unnamed(page), ...unseen(page), ...disordered(page)];
  for (const theme of ["light", "dark"]) {
    page.body.dataset.theme = theme;
    await settled(frame.contentWindow);
    found.push(...faint(page, frame.contentWindow).map((words) => `${words} (${theme})`));
  }
  return found;
}
