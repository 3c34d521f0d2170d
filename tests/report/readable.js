// What a reader could not make out on a page: text that is faint, cut off, or under other text.
const [least] = arguments;
const box = (element) => element.getBoundingClientRect();
const besides = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1;
// A line of text is a little taller than its letters.
const above = (a, b) => a.bottom <= b.top + 3 || b.bottom <= a.top + 3;

const channels = (colour) => (colour.match(/[\d.]+/g) ?? []).map(Number);
const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
function luminance(colour) {
  const [r, g, b] = channels(colour).map((x) => linear(x / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function ground(element) {
  for (let e = element; e; e = e.parentElement) {
    const found = getComputedStyle(e).backgroundColor;
    if (channels(found).length === 3) return found;
  }
  throw new Error("the page has no ground");
}
function contrast(element) {
  const style = getComputedStyle(element);
  const text = luminance(element.closest("svg") ? style.fill : style.color);
  const [light, dark] = [text, luminance(ground(element))].sort((a, b) => b - a);
  return (light + 0.05) / (dark + 0.05);
}

const said = (element) => element.textContent.trim().slice(0, 40);
const texts = [...document.querySelectorAll("body *")].filter((e) =>
  box(e).width > 1 && !["SCRIPT", "STYLE"].includes(e.tagName) &&
  [...e.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim()));
const faint = texts.filter((e) => contrast(e) < least).map((e) => `${said(e)}: ${contrast(e)}`);

const collisions = [], cut = [];
for (const chart of document.querySelectorAll(".chart")) {
  const frame = box(chart);
  const labels = [...chart.querySelectorAll(".xtick text, .ytick text, .cbaxis text, .legendtext")]
    .filter((e) => box(e).width);
  labels.forEach((a, i) => {
    if (box(a).left < frame.left - 1 || box(a).right > innerWidth) cut.push(`${chart.id}: ${said(a)}`);
    for (const b of labels.slice(i + 1))
      if (!besides(box(a), box(b)) && !above(box(a), box(b)))
        collisions.push(`${chart.id}: ${said(a)} and ${said(b)}`);
  });
}
return {
  faint, collisions, cut,
  width: innerWidth, wide: document.documentElement.scrollWidth,
  ground: channels(ground(document.body)), charts: document.querySelectorAll(".chart svg").length,
};
