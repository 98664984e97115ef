"""Pages for a browser: what the terminal says, in the same words, and pictures in place of its characters.

| file | what it makes |
| --- | --- |
| `document`, `page.html` | markup in which every text is escaped; one file with all it needs |
| `views` | a terminal's page as sections: its tables, labelled lines and remarks |
| `charts` | pictures as SVG, each beside a table or a list with the same numbers |
| `run`, `plan`, `bench` | the pages of `canzona report`, `plan` and `bench` |
"""
