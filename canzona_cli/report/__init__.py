"""Everything a person reads: tables, pages and live views. Files begin with the command that prints them.

| file | what it draws |
| --- | --- |
| `page`, `tables` | what views are made of: wrapped lines and tables |
| `charts`, `curves` | charts, each described once and drawn both with characters and as SVG |
| `markup`, `document` | a view as a page for a browser (`--html`), in the same words |
| `header` | how a run is described, in the same words everywhere |
| `errors` | errors of all commands |
| `train*` | `canzona train`: the live view, plain lines for pipes, the dry run |
| `run`, `run_page`, `compare`, `run_trace` | `canzona report`: a run and its breakdown, runs side by side, traces |
| `plan`, `layouts` | `canzona plan`, and `canzona recipes layouts` |
| `machines` | `canzona clusters` and `canzona doctor` |
| `bench*`, `tune`, `checkpoint`, `calibrate`, `data` | the command of that name |

Nothing here measures, simulates or reads run directories.
"""
