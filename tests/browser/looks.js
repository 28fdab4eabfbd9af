// Every visible piece of text with the contrast (WCAG 2) between it and what lies behind it.
const numbers = (color) => (color.match(/[\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => {
  const part = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const color = numbers(getComputedStyle(at).backgroundColor);
    if (color.length === 3 || color[3] === 1) return color;
  }
  return [255, 255, 255];
};
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  const box = element.getBoundingClientRect();
  if (!own || !box.width || !box.height || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
  const style = getComputedStyle(element);
  const isDrawn = element instanceof SVGElement;
  if (isDrawn && (style.fill === "none" || Number(style.fillOpacity) === 0)) continue;
  const [a, b] = [light(numbers(isDrawn ? style.fill : style.color)), light(behind(element))];
  found.push({
    text: element.textContent.trim().slice(0, 40),
    contrast: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05),
    size: parseFloat(style.fontSize), drawn: isDrawn,
  });
}
return found;
