// Draws the page's charts in the colours of the reader's scheme, and again when that changes.
(() => {
  "use strict";
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const coarse = matchMedia("(pointer: coarse)").matches;

  // Colours are names of CSS properties ("--series-1"): the style sheet has both schemes.
  const colored = (value) => {
    if (typeof value === "string") {
      return value.startsWith("--") ? getComputedStyle(root).getPropertyValue(value).trim() : value;
    }
    if (Array.isArray(value)) return value.map(colored);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, colored(item)]));
    }
    return value;
  };

  const axis = (given = {}) => ({
    gridcolor: "--line", linecolor: "--axis", zerolinecolor: "--line", tickcolor: "--axis",
    automargin: true, fixedrange: coarse, ...given,
    title: { standoff: 8, ...(given.title || {}) },
  });

  // Long names of rows in lines of their own, so that a phone has room left for the bars.
  const wrapped = (name, most) => name.split(" ").reduce((lines, word) => {
    const last = lines[lines.length - 1];
    if (lines.length && (last + " " + word).length <= most) {
      return [...lines.slice(0, -1), last + " " + word];
    }
    return [...lines, word];
  }, []).join("<br>");

  const rowsOf = (spec, narrow) => {
    if ((spec.layout.yaxis || {}).type !== "category") return {};
    const names = [...new Set(spec.data.flatMap((trace) => trace.y || []))];
    return { tickvals: names, ticktext: names.map((name) => wrapped(name, narrow ? 16 : 40)) };
  };

  // Powers of ten stand apart, however narrow the axis is.
  const ticksOf = (spec, narrow) =>
    (spec.layout.xaxis || {}).exponentformat === "power" ? { dtick: narrow ? 4 : 2, tickangle: 0 } : {};

  const layoutOf = (spec, chosen) => {
    const narrow = innerWidth <= 760;
    const layout = {
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "--soft" },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 12, t: 8, b: 8 },
      legend: {
        orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal",
        font: { color: "--text" },
      },
      // Dragging scrolls the page on a phone; with a mouse it zooms.
      dragmode: coarse ? false : "zoom",
      hoverlabel: {
        bgcolor: "--surface", bordercolor: "--axis", font: { color: "--text" }, align: "left",
      },
      hovermode: narrow ? "closest" : "x unified",
      ...spec.layout,
      xaxis: axis({ ...spec.layout.xaxis, ...ticksOf(spec, narrow) }),
      yaxis: axis({ ...spec.layout.yaxis, ...rowsOf(spec, narrow) }),
    };
    if (chosen) layout.xaxis.title.text = chosen;
    return colored(layout);
  };

  const dataOf = (spec, chosen) => spec.data.map((trace) => {
    const { xs, ...rest } = trace;
    return colored(xs ? { ...rest, x: xs[chosen] } : rest);
  });

  const axisOf = (name) => {
    const section = document.getElementById(name).closest("section");
    const pressed = section.querySelector('.axes [aria-pressed="true"]');
    const trace = charts[name].data.find((one) => one.xs);
    if (!trace) return null;
    return pressed ? pressed.dataset.axis : Object.keys(trace.xs)[0];
  };

  const draw = (name) => {
    const chosen = axisOf(name);
    return Plotly.react(
      name, dataOf(charts[name], chosen), layoutOf(charts[name], chosen),
      { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" },
    );
  };

  const drawAll = () => Promise.all(Object.keys(charts).map(draw));

  for (const button of document.querySelectorAll(".axes button")) {
    button.addEventListener("click", () => {
      const section = button.closest("section");
      for (const other of button.parentElement.children) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      for (const plot of section.querySelectorAll(".plot")) draw(plot.id);
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("(max-width: 760px)").addEventListener("change", drawAll);
  drawAll().then(() => { root.dataset.drawn = String(Object.keys(charts).length); });
})();
