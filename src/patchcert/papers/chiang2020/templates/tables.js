"use strict";
(() => {
  const FILTERS = ["data", "threat", "status"];

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function start(section) {
    const table = section.querySelector("table");
    const form = section.querySelector("form");
    const output = section.querySelector("output");
    const rows = [...table.tBodies];
    const heads = [...table.tHead.rows[0].cells];
    const state = { column: null, descending: false };

    function key(row, column) {
      const value = row.rows[0].cells[column].dataset.sort;
      if (value === undefined) return null;
      return heads[column].classList.contains("numeric") ? Number(value) : value;
    }

    function before(a, b) {
      const order = rows.indexOf(a) - rows.indexOf(b);
      if (state.column === null) return order;
      const left = key(a, state.column), right = key(b, state.column);
      if (left === null || right === null) return (left === null) - (right === null) || order;
      const sign = state.descending ? -1 : 1;
      if (typeof left === "string") return sign * left.localeCompare(right, "en", { numeric: true }) || order;
      return sign * (left - right) || order;
    }

    function isWanted(row) {
      const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
      const label = row.dataset.label.toLowerCase();
      return words.every((word) => label.includes(word)) && FILTERS.every(
        (name) => form.elements[name].value === "" || form.elements[name].value === row.dataset[name]);
    }

    function refresh() {
      table.append(...[...rows].sort(before));
      for (const row of rows) row.hidden = !isWanted(row);
      output.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
      heads.forEach((head, column) => {
        if (column === state.column) head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      form.elements.sort.value = state.column === null ? "" : `${state.column}${state.descending ? " down" : ""}`;
    }

    function option(select, value, text) {
      const made = element("option", text);
      made.value = value;
      select.append(made);
    }

    function fold(row, folded) {
      row.classList.toggle("folded", folded);
      row.classList.toggle("open", !folded);
      row.querySelector(".fold").setAttribute("aria-expanded", String(!folded));
    }

    heads.forEach((head, column) => {
      const button = element("button", head.textContent);
      button.type = "button";
      button.addEventListener("click", () => {
        state.descending = state.column === column && !state.descending;
        state.column = column;
        refresh();
      });
      option(form.elements.sort, String(column), `${head.textContent}, rising`);
      option(form.elements.sort, `${column} down`, `${head.textContent}, falling`);
      head.replaceChildren(button);
    });
    for (const name of FILTERS) {
      const values = [...new Set(rows.map((row) => row.dataset[name]))];
      for (const value of values) option(form.elements[name], value, value);
      form.elements[name].parentElement.hidden = values.length < 2;
    }
    for (const row of rows) {
      const cell = row.rows[0].cells[0];
      const button = element("button", undefined, "fold");
      button.type = "button";
      button.append(...cell.childNodes);
      cell.append(button);
      fold(row, true);
      row.rows[0].addEventListener("click", () => fold(row, !row.classList.contains("folded")));
    }
    form.elements.sort.addEventListener("input", () => {
      const [column, down] = form.elements.sort.value.split(" ");
      state.column = column === "" ? null : Number(column);
      state.descending = down !== undefined;
    });
    form.addEventListener("input", refresh);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = false;
    refresh();

    function reveal() {
      const row = rows.find((each) => `#${each.id}` === location.hash);
      if (!row) return;
      form.reset();
      refresh();
      fold(row, false);
      row.scrollIntoView({ block: "center" });
    }
    window.addEventListener("hashchange", reveal);
    reveal();
  }

  for (const section of document.querySelectorAll("[data-results]")) start(section);
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
})();
