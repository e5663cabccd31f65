"use strict";
(() => {
  const PAGE = 50;

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function marginText(margin) {
    if (margin === null) return "not finite";
    const text = Math.abs(margin) < 0.1 ? String(Number(margin.toPrecision(2))) : margin.toFixed(2);
    return margin < 0 ? text.replaceAll("-", "\u2212") : `+${text}`;
  }

  function start(section) {
    const data = JSON.parse(section.querySelector("script").textContent);
    const sprite = section.querySelector("img.sprite");
    const body = section.querySelector("tbody");
    const form = section.querySelector("form");
    const more = section.querySelector("button.more");
    const output = section.querySelector("output");
    const state = { key: "index", descending: false, shown: PAGE };
    const heads = [...section.querySelectorAll("th[data-key]")];
    const className = (label) => label < 0 ? "abstained" : data.classes[label] ?? String(label);
    const show = {
      index: (row) => thumbnailed(row),
      label: (row) => element("td", className(data.label[row])),
      prediction: (row) => element("td", className(data.prediction[row])),
      verdict: (row) => tagged(data.verdicts[data.verdict[row]]),
      margin: (row) => element("td", marginText(data.margin[row])),
      lead: (row) => element("td", marginText(data.lead[row])),
      masks: (row) => masked(row),
      top: (row) => element("td", data.top[row] < 0 ? "" : `${data.top[row]}, ${data.left[row]}`),
      outcome: (row) => tagged(data.outcomes[data.outcome[row]]),
    };

    function scale() {
      const height = Number(sprite.dataset.height);
      return height > 56 ? 56 / height : Math.max(1, Math.round(28 / height));
    }

    function thumbnail(row) {
      const span = element("span", "", "thumb");
      const height = scale() * Number(sprite.dataset.height), width = scale() * Number(sprite.dataset.width);
      span.style.width = `${width}px`;
      span.style.height = `${height}px`;
      span.style.backgroundImage = `url(${sprite.src})`;
      span.style.backgroundSize = `${width * data.spriteColumns}px auto`;
      span.style.backgroundPosition =
        `${-width * (row % data.spriteColumns)}px ${-height * Math.floor(row / data.spriteColumns)}px`;
      return span;
    }

    function masked(row) {
      const cell = element("td");
      if (sprite && data.boxes.length) {
        const span = thumbnail(row);
        for (const mask of new Set(data.masks[row].split(", "))) {
          const [top, left, height, width] = data.boxes[mask].map((pixels) => `${pixels * scale()}px`);
          span.append(Object.assign(element("i"), { style: `top:${top};left:${left};height:${height};width:${width}` }));
        }
        cell.append(span);
      }
      cell.append(data.masks[row]);
      return cell;
    }

    function tagged(word) {
      const cell = element("td");
      cell.append(element("span", word, `tag ${word.replaceAll(" ", "-")}`));
      return cell;
    }

    function thumbnailed(row) {
      const cell = element("td");
      if (sprite) cell.append(thumbnail(row));
      cell.append(String(data.index[row]));
      return cell;
    }

    function draw(row) {
      const line = element("tr");
      for (const { dataset: { key } } of heads) line.append(show[key]?.(row) ?? element("td", String(data[key][row])));
      return line;
    }

    function before(a, b) {
      const column = data[state.key];
      const left = column[a] ?? -Infinity, right = column[b] ?? -Infinity;
      if (left !== right) return (left < right ? -1 : 1) * (state.descending ? -1 : 1);
      if (state.key === "top" && data.left[a] !== data.left[b])
        return (data.left[a] - data.left[b]) * (state.descending ? -1 : 1);
      return data.index[a] - data.index[b];
    }

    function chosen() {
      const wanted = (name) => form.elements[name].value.trim();
      const keep = (row) => ["verdict", "outcome", "label", "index"].every(
        (name) => wanted(name) === "" || String(data[name][row]) === wanted(name));
      return data.index.map((_, row) => row).filter(keep).sort(before);
    }

    function refresh() {
      const rows = chosen();
      body.replaceChildren(...rows.slice(0, state.shown).map(draw));
      output.textContent = `${rows.length.toLocaleString("en")} of ${data.index.length.toLocaleString("en")} images`;
      more.hidden = rows.length <= state.shown;
      for (const head of heads) {
        if (head.dataset.key === state.key) head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      }
    }

    function options(name, values, show) {
      for (const value of values) {
        const option = element("option", show(value));
        option.value = String(value);
        form.elements[name].append(option);
      }
    }

    for (const head of heads) {
      const button = element("button", head.textContent);
      button.type = "button";
      button.addEventListener("click", () => {
        state.descending = state.key === head.dataset.key && !state.descending;
        state.key = head.dataset.key;
        refresh();
      });
      head.replaceChildren(button);
    }
    const present = (name) => [...new Set(data[name])].sort((a, b) => a - b);
    options("verdict", present("verdict"), (value) => data.verdicts[value]);
    options("outcome", present("outcome"), (value) => data.outcomes[value]);
    options("label", present("label"), className);
    form.addEventListener("input", () => { state.shown = PAGE; refresh(); });
    form.addEventListener("submit", (event) => event.preventDefault());
    more.addEventListener("click", () => { state.shown += 4 * PAGE; refresh(); });
    form.hidden = false;
    refresh();
  }

  for (const section of document.querySelectorAll("[data-images]")) start(section);
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
})();
