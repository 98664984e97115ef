"use strict";
// Shows the values under the pointer; the arrow keys move to the previous or next step.
for (const figure of document.querySelectorAll("figure[data-curves]")) {
  const curves = JSON.parse(figure.dataset.curves);
  const plot = figure.querySelector(".plot");
  const cursor = figure.querySelector(".cursor");
  const readout = figure.querySelector(".readout");
  const places = [...new Set(curves.flatMap((curve) => curve.points.map((point) => point[0])))].sort((a, b) => a - b);
  let at = places.length - 1;
  const nearest = (points, place) =>
    points.reduce((best, point) => (Math.abs(point[0] - place) < Math.abs(best[0] - place) ? point : best));
  const show = (place) => {
    at = places.indexOf(nearest(places.map((x) => [x]), place)[0]);
    const closest = curves.map((curve) => [curve.group, nearest(curve.points, places[at])]);
    const step = nearest(closest.map(([, point]) => point), places[at])[1];
    const values = [...new Set(closest.map(([group]) => group))].flatMap((group) => {
      const here = closest.filter(([name, point]) => name === group && Math.abs(point[0] - places[at]) <= 10);
      const texts = here.map(([, point]) => point[2]).join(" ");
      return here.length ? [curves.length > 1 ? `${group} ${texts}` : texts] : [];
    });
    readout.textContent = `${figure.dataset.x} ${step.toLocaleString("en")}: ${values.join(", ")}`;
    cursor.setAttribute("x1", `${places[at] / 10}%`);
    cursor.setAttribute("x2", `${places[at] / 10}%`);
    figure.classList.add("shown");
  };
  plot.setAttribute("tabindex", "0");
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    show((1000 * (event.clientX - box.left)) / box.width);
  });
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move !== undefined) {
      event.preventDefault();
      show(places[Math.min(places.length - 1, Math.max(0, at + move))]);
    }
  });
  for (const left of ["pointerleave", "blur"]) {
    plot.addEventListener(left, () => {
      figure.classList.remove("shown");
      readout.textContent = "";
    });
  }
}
