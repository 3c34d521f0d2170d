"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const page = 40;
let shown = page;

const make = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};
const visible = (token) => token.replace(/\n/g, "↵").replace(/\t/g, "⇥");
const percent = (share) => (100 * share).toFixed(share < 0.001 ? 3 : 1) + " %";
const signed = (number) => (number < 0 ? "−" : "+") + Math.abs(number).toPrecision(2);
const effect = (each) => (each.effect ? each.effect.loss_change : null);

data.components.forEach((each, number) => {
  each.number = number;
  each.words = [each.name, ...each.tokens.map((token) => token.token),
    ...each.examples.map((example) => example.tokens.join(""))].join("\n").toLowerCase();
});
const orders = {
  effect: (a, b) => (effect(b) ?? -Infinity) - (effect(a) ?? -Infinity) || a.number - b.number,
  importance: (a, b) => b.importance - a.importance,
  active: (a, b) => b.active - a.active,
  rare: (a, b) => (a.active || 2) - (b.active || 2),
  name: (a, b) => a.number - b.number,
};

at("about").textContent =
  `${data.components.length.toLocaleString("en")} components, ` +
  `${data.positions.toLocaleString("en")} positions of text, ` +
  `loss of the target ${data.loss.toFixed(3)} nats. ` +
  "A color shows the importance at each token, with the largest importance in a frame. " +
  "Effect is the change of the loss when this component alone is off, in its most important windows.";
for (const name of ["", ...Object.keys(data.sites)]) {
  const option = make("option", "", name || "all matrices");
  option.value = name;
  at("site").append(option);
}

function contexts(example, parent) {
  const line = make("div", "text");
  example.tokens.forEach((token, number) => {
    const span = make("span", number === example.peak ? "peak" : "", visible(token));
    span.style.background = `rgb(var(--mark) / ${0.6 * Math.min(example.importances[number], 1)})`;
    span.title = `importance ${example.importances[number]}`;
    line.append(span);
  });
  parent.append(line);
}

function card(each) {
  const article = make("article");
  article.id = each.name;
  article.append(make("h2", "", each.name));
  const numbers = make("div", "numbers");
  numbers.append(make("span", "", `active at ${percent(each.active)}`));
  numbers.append(make("span", "", `mean importance ${each.importance.toPrecision(2)}`));
  if (each.effect) {
    numbers.append(make("span", "", `effect ${signed(each.effect.loss_change)} nats`));
    const { token, loss_change: change } = each.effect.largest;
    numbers.append(make("span", "", `largest ${signed(change)} at “${visible(token)}”`));
  }
  article.append(numbers);
  const tokens = make("div");
  each.tokens.forEach((token) => {
    const chip = make("span", "chip", visible(token.token));
    chip.title = `mean importance ${token.importance}, ${token.count} occurrences`;
    chip.style.background = `rgb(var(--mark) / ${0.6 * Math.min(token.importance, 1)})`;
    tokens.append(chip);
  });
  article.append(tokens);
  each.examples.forEach((example) => contexts(example, article));
  if (each.sources.length) {
    const line = make("div", "small", "from ");
    each.sources.forEach((source) => {
      const chip = make("a", "chip", `${source.name} ${signed(100 * source.share)} %`);
      chip.href = "#" + source.name;
      chip.addEventListener("click", (event) => {
        event.preventDefault();
        at("site").value = "";
        at("query").value = source.name;
        restart();
      });
      line.append(chip);
    });
    article.append(line);
  }
  if (!each.examples.length) article.append(make("div", "small", "never active in this text"));
  return article;
}

function draw() {
  const query = at("query").value.toLowerCase();
  const site = at("site").value;
  const exact = data.components.some((each) => each.name.toLowerCase() === query);
  const matches = data.components
    .filter((each) => !site || each.site === site)
    .filter((each) => exact ? each.name.toLowerCase() === query : each.words.includes(query))
    .sort(orders[at("order").value]);
  at("count").textContent = `${matches.length.toLocaleString("en")} components`;
  at("list").replaceChildren(...matches.slice(0, shown).map(card));
  at("more").hidden = matches.length <= shown;
}

function restart() {
  shown = page;
  draw();
  scrollTo(0, 0);
}

at("controls").addEventListener("submit", (event) => event.preventDefault());
for (const id of ["query", "site", "order"]) at(id).addEventListener("input", restart);
at("more").addEventListener("click", () => {
  shown += page;
  draw();
});
draw();
