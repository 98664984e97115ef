"""Everything a person reads: tables, pages and live views. Files begin with the command that prints them.

| file | what it draws |
| --- | --- |
| `page`, `tables`, `charts` | what pages are made of: wrapped lines, tables, bars and curves of characters |
| `html/` | the same for a browser: `--html` |
| `header` | how a run is described, in the same words everywhere |
| `errors` | errors of all commands |
| `train*` | `canzona train`: the live view, plain lines for pipes, the dry run |
| `run`, `compare`, `run_trace` | `canzona report`: a run and its breakdown, runs side by side, traces |
| `plan*`, `bench*`, `checkpoint*`, `calibrate`, `data`, `doctor`, `recipes` | the command of that name |

Nothing here measures, simulates or reads run directories.
"""
