"""Looks at pages as a person would: `scripts/check_pages.py FOLDER PAGE.html ...`, by hand, with Chromium on PATH.

Every page is loaded 400 and 1,600 pixels wide, light and dark. A message in the browser's console, a page wider than
its window, or a picture that does not answer the pointer ends it with 1; screenshots go to FOLDER, to be looked at.
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
"""Chromium's numbers of them."""


def _chromium(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("there is no Chromium on PATH (Debian: apt-get install chromium)")
    fixed = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files")
    logged = ("--enable-logging=stderr", "--force-device-scale-factor=1", "--virtual-time-budget=3000")
    return subprocess.run([program, *fixed, *logged, *arguments], capture_output=True, text=True, check=True)


def check(page: Path, folder: Path, width: int, scheme: str) -> list[str]:
    """What is wrong with a page in one width and scheme."""
    name = f"{page.stem}-{width}-{scheme}"
    look = f"--blink-settings=preferredColorScheme={_SCHEMES[scheme]}"
    with tempfile.NamedTemporaryFile("w", suffix=".html") as harness:
        harness.write(_HARNESS % (width, page.absolute().as_uri()))
        harness.flush()
        done = _chromium(look, "--window-size=1700,1000", "--dump-dom", Path(harness.name).as_uri())
    shot = _chromium(look, f"--window-size={width},4000", f"--screenshot={folder / name}.png", page.absolute().as_uri())
    found = re.search("<pre>(.*?)</pre>", done.stdout)
    seen = json.loads(unescape(found[1])) if found is not None and found[1] else {}
    said = [line for line in (done.stderr + shot.stderr).splitlines() if "CONSOLE" in line]
    problems = [f"the console says: {line.partition('CONSOLE')[2]}" for line in said]
    if not seen:
        return [*problems, f"{name}: it was not loaded"]
    if seen["wide"] > width:
        problems.append(f"is {seen['wide']} pixels wide")
    if seen["silent"]:
        problems.append(f"{seen['silent']} of {seen['plots']} pictures do not answer the pointer")
    print(f"{name}: {seen['plots']} pictures, background {seen['background']}, {len(problems)} problems")
    return [f"{name}: {problem}" for problem in problems]


def main(folder: Path, pages: list[Path]) -> int:
    """Check all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    ways = [(page, width, scheme) for page in pages for width in (400, 1600) for scheme in _SCHEMES]
    problems = [problem for page, width, scheme in ways for problem in check(page, folder, width, scheme)]
    print("\n".join(problems) or f"nothing wrong; look at the screenshots in {folder}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
