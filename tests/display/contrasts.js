// Relative luminance and contrast as in WCAG 2.2: of each text against what is painted behind it.
const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
const pen = canvas.getContext("2d", { willReadFrequently: true });
const paint = (colors) => {
  pen.clearRect(0, 0, 1, 1);
  for (const color of colors) {
    pen.fillStyle = color;
    pen.fillRect(0, 0, 1, 1);
  }
  return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) =>
  0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
const found = [];
for (const element of document.querySelectorAll("main *")) {
  const says = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!says || !element.checkVisibility()) continue;
  const chain = [];
  for (let one = element; one !== null; one = one.parentElement) chain.unshift(getComputedStyle(one));
  const behind = chain.map((style) => style.backgroundColor);
  const opacity = chain.reduce((product, style) => product * style.opacity, 1);
  const ground = paint(behind);
  const ink = paint([...behind, chain[chain.length - 1].color]);
  const seen = ink.map((v, i) => opacity * v + (1 - opacity) * ground[i]);
  const [a, b] = [luminance(seen), luminance(ground)];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  found.push([contrast, element.className + " " + element.textContent.slice(0, 40)]);
}
return found;
