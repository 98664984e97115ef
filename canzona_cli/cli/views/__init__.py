"""The terminal views and HTML pages of all commands. A file is named after the command that shows its views.

| file | contents |
| --- | --- |
| `page`, `document` | the parts of all views, as text (wrapped lines, tables) and as the HTML page (`--html`) |
| `charts` | charts, drawn with characters in a terminal and as SVG in an HTML page |
| `header` | the description of a run, shared by all commands |
| `errors` | the error messages of all commands |
| `train*` | `canzona train`: the live view, plain lines for pipes, the dry run |
| `run`, `run_page`, `compare` | `canzona report`: a run, its breakdown, and comparisons |
| `plan`, `layouts` | `canzona plan` |
| `machines` | `canzona clusters` and `canzona doctor` |
| `bench`, `checkpoint`, `calibrate`, `data` | the command of that name |

Most views only show results that were computed elsewhere. Exceptions: `layouts` plans and searches,
`checkpoint` reads and verifies checkpoints, `header` counts matrices, and `run_page` reads run directories.
"""
