"""How things read: every table, page, live view and figure. Files begin with the command that prints them.

| file | what it draws |
| --- | --- |
| `page`, `tables`, `charts` | what pages are made of: wrapped lines, tables, bars and curves of characters |
| `figures` | what figures in PNG files are made of |
| `html/` | the same for a browser: `--html` |
| `header` | how a run is described, in the same words everywhere |
| `errors` | errors of all commands |
| `train_*` | `canzona train`: the live view, plain lines for pipes, the dry run |
| `run*` | `canzona report`: a run afterwards or two side by side, its breakdown, traces |
| `plan*`, `bench*`, `checkpoint*`, `calibrate`, `data`, `doctor`, `recipes` | the command of that name |

Nothing here measures, simulates or reads run directories.
"""
