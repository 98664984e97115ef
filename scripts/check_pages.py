"""Checks HTML pages in a browser: `scripts/check_pages.py FOLDER PAGE.html ...`, run by hand, with Chromium on PATH.

Every page is loaded with a width of 400 and of 1,600 pixels, in light and in dark mode. Exits 1 if the browser's
console has a message, a page is wider than its window, or a chart does not respond to the pointer. Screenshots are
written to FOLDER.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path

_HARNESS = """<!DOCTYPE html><meta charset="utf-8"><style>body{margin:0}iframe{border:0;width:%dpx;height:900px}</style>
<iframe src="%s"></iframe><pre></pre><script>
window.onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const plots = [...page.querySelectorAll(".plot")];
  const silent = plots.filter((plot) => {
    const box = plot.getBoundingClientRect();
    plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2}));
    return !plot.closest("figure").querySelector(".readout").textContent;
  });
  document.querySelector("pre").textContent = JSON.stringify({
    wide: page.documentElement.scrollWidth, plots: plots.length, silent: silent.length,
    background: getComputedStyle(page.body).backgroundColor});
};</script>"""
_SCHEMES = {"dark": "0", "light": "1"}
"""The numbers by which Chromium's settings name the colour schemes."""


def _chromium(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("there is no Chromium on PATH (Debian: apt-get install chromium)")
    fixed = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files")
    logged = ("--enable-logging=stderr", "--force-device-scale-factor=1", "--virtual-time-budget=3000")
    return subprocess.run([program, *fixed, *logged, *arguments], capture_output=True, text=True, check=True)


def check(page: Path, folder: Path, width: int, scheme: str) -> list[str]:
    """Returns the problems of a page at one width and colour scheme; writes a screenshot."""
    name = f"{page.stem}-{width}-{scheme}"
    look = f"--blink-settings=preferredColorScheme={_SCHEMES[scheme]}"
    with tempfile.NamedTemporaryFile("w", suffix=".html") as harness:
        harness.write(_HARNESS % (width, page.absolute().as_uri()))
        harness.flush()
        done = _chromium(look, "--window-size=1700,1000", "--dump-dom", Path(harness.name).as_uri())
    shot = _chromium(look, f"--window-size={width},4000", f"--screenshot={folder / name}.png", page.absolute().as_uri())
    output = re.search("<pre>(.*?)</pre>", done.stdout)
    state = json.loads(unescape(output[1])) if output is not None and output[1] else {}
    messages = [line for line in (done.stderr + shot.stderr).splitlines() if "CONSOLE" in line]
    problems = [f"console message: {line.partition('CONSOLE')[2]}" for line in messages]
    if not state:
        return [*problems, f"{name}: the page was not loaded"]
    if state["wide"] > width:
        problems.append(f"the page is {state['wide']} pixels wide")
    if state["silent"]:
        problems.append(f"{state['silent']} of {state['plots']} charts do not respond to the pointer")
    print(f"{name}: {state['plots']} charts, background {state['background']}, {len(problems)} problems")
    return [f"{name}: {problem}" for problem in problems]


def main(folder: Path, pages: list[Path]) -> int:
    """Checks all pages at all widths and colour schemes; returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    variants = [(page, width, scheme) for page in pages for width in (400, 1600) for scheme in _SCHEMES]
    problems = [problem for page, width, scheme in variants for problem in check(page, folder, width, scheme)]
    print("\n".join(problems) or f"no problems; look at the screenshots in {folder}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
