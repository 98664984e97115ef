"""Reads the commands of a shell script and replaces their variables, without running anything.

The script is read as if it were started without arguments. Some values stay unknown and are marked in the
words that contain them: variables that the script does not set, `$(commands)`, and values set under a
condition that the script alone does not decide. In conditions, unset variables are empty, and tests of files
are undecided. Before `&&` and `||`, other commands count as successful. The body of a loop is read once.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fnmatch import fnmatchcase
from itertools import dropwhile
from typing import Final

from canzona_cli.config.reading import Unreadable

LARGEST: Final = 1 << 20
"""The maximum number of characters in a value after its variables are replaced."""
_MARK: Final = "\ue000"
"""The character on both sides of an unknown part of a word. A `?` follows the first one, unless the part is
just an unset variable."""
_ENDS: Final = " \t\n;&|()<>"
_NAME: Final = re.compile(r"[A-Za-z_]\w*|[0-9@*#?]")
_ASSIGNED: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BRACED: Final = re.compile(r"([A-Za-z_]\w*|[0-9])(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_QUOTES: Final = ("'", '"', "`")
_TESTING: Final = frozenset({"if", "elif", "while", "!"})
_TESTS: Final = frozenset({"[", "[[", "test", "!", "true", "false", ":"})
"""The commands whose outcome may follow from the script alone."""
_DECLARING: Final = frozenset({"export", "local", "declare", "readonly", "typeset"})
_BINARY: Final[Mapping[type[ast.AST], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_COMPARED: Final = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


@dataclass(frozen=True, kw_only=True)
class Script:
    """The commands and variables of a script, as far as reading it reveals them."""

    commands: tuple[tuple[str, ...], ...]
    """The words of every command that may run, in order, except assignments."""
    variables: Mapping[str, str]
    """The last value of every variable; the elements of an array are separated by spaces."""
    undecided: tuple[str, ...]
    """The words assigned to variables under a condition that the script alone does not decide."""


def unknown(word: str) -> str | None:
    """Returns the first unknown part of a word, as in the script: `$TP`; None if the whole word is known."""
    name = word.split(_MARK)[1].lstrip("?") if _MARK in word else None
    return name and (f"${name}" if name.isalnum() or "_" in name else name)


def known_part(word: str) -> str:
    """Returns a word without its unknown parts."""
    return "".join(word.split(_MARK)[::2])


def read_script(text: str) -> Script:
    """Reads a script.

    Raises:
        Unreadable: a quote or bracket is not closed, a value is too long, or variables are nested too deeply.
    """
    reader = _Reader(text, {})
    try:
        while reader.at < len(text):
            reader.command()
    except RecursionError:
        raise Unreadable("nests variables too deeply") from None
    undecided = tuple(dict.fromkeys(reader.undecided))
    return Script(commands=tuple(reader.commands), variables=reader.variables, undecided=undecided)


class _Truth(IntEnum):
    """The value of a condition. The minimum of two values is their `and`, the maximum their `or`."""

    NO = 0
    UNKNOWN = 1
    YES = 2

    def __invert__(self) -> "_Truth":
        return _Truth(2 - self)


@dataclass
class _Branch:
    """An open `if`, loop, `case` or group in braces."""

    reached: _Truth
    """YES if the preceding commands let the branch run, NO if they do not."""
    taken: _Truth = _Truth.YES
    """YES if the current part runs, NO if it does not."""
    before: _Truth = _Truth.NO
    """YES if an earlier part of the same `if` runs, NO if none does."""
    reading: bool = False
    """True while the condition is being read."""

    def enter(self, keyword: str, condition: _Truth) -> None:
        """Begins the part after `then`, `do`, `elif` or `else`."""
        self.reading = keyword == "elif"
        if keyword in ("elif", "else"):
            self.taken = ~self.before
        else:
            self.taken = min(~self.before, condition)
            self.before = max(self.before, condition)


class _Reader:
    """A reader of a script: its position, and the variables and commands that it has read so far."""

    def __init__(self, text: str, variables: dict[str, str]) -> None:
        self.text, self.variables = text, variables
        self.at = 0
        """The current position in the text."""
        self.commands: list[tuple[str, ...]] = []
        self.undecided: list[str] = []
        self._open: list[_Branch] = []
        self._joined = ""
        """The operator between the previous command and the current one."""
        self._outcome = _Truth.YES
        """The outcome of the previous commands, joined by `&&` and `||`; YES if they succeed."""
        self._documents: list[str] = []
        """The delimiters of the here-documents that start on the next line."""

    def command(self) -> None:
        """Reads a command and the operator that ends it."""
        words, end = self._words()
        self._apply(words, end)
        if words or end != "\n":  # a line may end after an operator
            self._joined = end

    def _words(self) -> tuple[list[str], str]:
        words: list[str] = []
        while self.at < len(self.text):
            ahead = self.text[self.at : self.at + 3]
            if ahead[0] in " \t" or ahead.startswith("\\\n"):
                self.at += 1 if ahead[0] in " \t" else 2
            elif ahead[0] == "#":
                self.at = self._find("\n", closed=False)
            elif ahead.startswith("((") and (not words or words[-1] in _TESTING):
                end = self._find("))", closed=True)
                words.append(self.text[self.at : end + 2])
                self.at = end + 2
            elif ahead[0] in "<>" or ahead.startswith("&>"):
                self._redirect()
            elif ahead[0] in _ENDS:
                sign = ahead[:2] if ahead[:2] in ("&&", "||", ";;") else ahead[0]
                self.at += len(sign)
                if sign == "\n":
                    self._skip_documents()
                return words, sign
            else:
                word = self._word()
                redirects = word.isdecimal() and self.text[self.at : self.at + 1] in ("<", ">")  # as in `2>&1`
                if not redirects:
                    words.append(word)
        return words, "\n"

    def _word(self) -> str:
        word = self.piece(_ENDS)
        if self.text[self.at : self.at + 1] == "(" and _ASSIGNED.fullmatch(word):
            self.at += 1
            elements: list[str] = []
            while True:
                if self.at >= len(self.text):
                    raise Unreadable(f"does not close the bracket of {word}(")
                words, end = self._words()
                elements += words
                if end == ")":
                    break
            word += (" " if word.endswith("+=") else "") + " ".join(elements)
        return word

    def piece(self, ends: str) -> str:
        """Reads up to one of the characters `ends`, replaces variables and removes quotes."""
        parts: list[str] = []
        length = 0
        while self.at < len(self.text) and (sign := self.text[self.at]) not in ends:
            self.at += 1
            if sign == "'" and ends != '"':
                end = self._find("'", closed=True)
                parts.append(self.text[self.at : end])
                self.at = end + 1
            elif sign == '"' and ends != '"':
                parts.append(self.piece('"'))
                if self.at >= len(self.text):
                    raise Unreadable("does not close a double quote")
                self.at += 1
            elif sign == "\\":
                escaped = self.text[self.at : self.at + 1]
                self.at += 1
                backslash = "\\" if ends == '"' and escaped not in '$`"\\\n' else ""
                parts.append(backslash + ("" if escaped == "\n" else escaped))
            elif sign == "`":
                self.at = self._find("`", closed=True) + 1
                parts.append(f"{_MARK}?`...`{_MARK}")
            else:
                parts.append(self._dollar() if sign == "$" else sign)
            length += len(parts[-1])
            if length > LARGEST:
                raise Unreadable(f"has a value of more than {LARGEST:,} characters")
        return "".join(parts)

    def _dollar(self) -> str:
        """Reads the expansion that follows the `$` before the current position; returns its value."""
        for opening, closing in (("((", "))"), ("(", ")"), ("{", "}")):
            if self.text.startswith(opening, self.at):
                inside = self._bracketed(opening, closing)
                if opening == "{":
                    return self._braced(inside)
                number = self._arithmetic(inside) if opening == "((" else None
                return f"{_MARK}?$(...){_MARK}" if number is None else str(number)
        if (name := _NAME.match(self.text, self.at)) is None:
            return "$"
        self.at = name.end()
        return self._value(name[0])

    def _braced(self, inside: str) -> str:
        match = _BRACED.fullmatch(inside)
        if match is None:
            return f"{_MARK}?${{{inside}}}{_MARK}"
        name, _, sign, alternative = match.groups(default="")
        value = self._value(name)
        is_set = name in self.variables and (value != "" or ":" not in sign)
        if sign.endswith("+") or (sign.endswith(("-", "=")) and not is_set):
            if sign.endswith("+") and not is_set:
                return ""
            return _Reader(alternative, self.variables).piece("")
        return value

    def _value(self, name: str) -> str:
        special = {"#": "0", "@": "", "*": "", "?": "0"}
        return self.variables.get(name, special.get(name, f"{_MARK}{name}{_MARK}"))

    def _arithmetic(self, expression: str) -> int | None:
        """Evaluates an arithmetic expression of the shell; returns None if it has unknown parts or no value that
        fits in 64 bits."""
        text = _Reader(expression, self.variables).piece("")
        text = re.sub(r"[A-Za-z_]\w*", lambda name: self._value(name[0]), text)
        text = text.strip().replace("/", "//").replace("&&", " and ").replace("||", " or ")
        try:
            value = _evaluate(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return None
        return value if abs(value) < 1 << 63 else None

    def _bracketed(self, opening: str, closing: str) -> str:
        """Reads up to the matching closing bracket; returns the text inside, which may have nested brackets."""
        start, depth = self.at + len(opening), 0
        while self.at < len(self.text):
            sign = self.text[self.at]
            depth += (sign == opening[0]) - (sign == closing[0])
            self.at += 1
            if depth == 0:
                return self.text[start : self.at - len(closing)]
        raise Unreadable(f"does not close ${opening}")

    def _find(self, sign: str, *, closed: bool) -> int:
        place = self.text.find(sign, self.at)
        if place < 0 and closed:
            line = self.text.count("\n", 0, self.at) + 1
            raise Unreadable(f"does not close the {'quote' if sign in _QUOTES else 'bracket'} in line {line}")
        return place if place >= 0 else len(self.text)

    def _redirect(self) -> None:
        """Skips a redirection and its target."""
        signs = re.compile(r"[<>&|]+-?").match(self.text, self.at)
        assert signs is not None
        self.at = signs.end()
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        target = self.piece(_ENDS)
        if signs[0] in ("<<", "<<-"):
            self._documents.append(target)

    def _skip_documents(self) -> None:
        for delimiter in self._documents:
            end = re.compile(rf"^\t*{re.escape(delimiter)}$", re.MULTILINE).search(self.text, self.at)
            self.at = len(self.text) if end is None else end.end()
        self._documents = []

    def _apply(self, words: list[str], end: str) -> None:
        """Updates the reader after a command: opens or closes a branch at a keyword, evaluates the test of a
        condition, or records the command or the variables that it sets."""
        while words and (remaining := self._keyword(words)) is not None:
            words = remaining
        if not words:
            return
        if not (end == ")" and self._runs is _Truth.UNKNOWN):  # a pattern of `case`
            self._record(words)
        in_condition = bool(self._open) and self._open[-1].reading
        is_test = in_condition or words[0] in _TESTS or words[0].startswith("((")
        outcome = self._test(words) if is_test else _Truth.YES
        if self._joined == "&&":
            outcome = min(self._outcome, outcome)
        elif self._joined == "||":
            outcome = max(self._outcome, outcome)
        self._outcome = outcome

    def _keyword(self, words: list[str]) -> list[str] | None:
        """Applies the keyword at the beginning of a command; returns the words after it, or None without a
        keyword."""
        keyword = words[0]
        branch = self._open[-1] if self._open else None
        if keyword in ("if", "while", "{"):
            self._open.append(_Branch(reached=self._reached, reading=keyword != "{"))
            self._joined = ""
        elif keyword in ("for", "select", "until", "case"):
            taken = _Truth.UNKNOWN if keyword == "case" else _Truth.YES
            self._open.append(_Branch(reached=self._reached, taken=taken))
            self._outcome = _Truth.YES
            for name in words[1:2] if keyword in ("for", "select") else ():
                self._set(name, f"{_MARK}?{name}{_MARK}")
            return []
        elif keyword in ("fi", "done", "esac", "}") and branch is not None:
            self._open.pop()
            if keyword != "}" or branch.reached is not _Truth.YES:  # else the outcome of its last command
                self._outcome = _Truth.UNKNOWN
            return []
        elif keyword in ("then", "do", "elif", "else") and branch is not None:
            branch.enter(keyword, self._outcome)
        elif keyword == "function":
            return words[2:]
        elif keyword not in ("time", "}"):
            return None
        return words[1:]

    @property
    def _reached(self) -> _Truth:
        """YES if the previous command and the operator after it let the current command run."""
        return {"&&": self._outcome, "||": ~self._outcome}.get(self._joined, _Truth.YES)

    @property
    def _runs(self) -> _Truth:
        """YES if the current command runs, NO if it does not."""
        return min((self._reached, *(min(branch.reached, branch.taken) for branch in self._open)))

    def _record(self, words: list[str]) -> None:
        if self._runs is _Truth.NO:
            return
        if words[0] in _DECLARING:
            words = [word for word in words[1:] if _ASSIGNED.match(word)]
        if all(_ASSIGNED.match(word) for word in words):
            for word in words:
                match = _ASSIGNED.match(word)
                assert match is not None
                (name, added), value = match.groups(), word[match.end() :]
                if self._runs is _Truth.UNKNOWN:
                    self.undecided += value.split()
                    value = "" if added else f"{_MARK}?{name}{_MARK}"
                old = self.variables.get(name, "") if added else ""
                self._set(name, old + value)
        else:
            self.commands.append(tuple(dropwhile(_ASSIGNED.match, words)))

    def _set(self, name: str, value: str) -> None:
        if len(value) > LARGEST:
            raise Unreadable(f"has a value of more than {LARGEST:,} characters")
        self.variables[name] = value

    def _test(self, words: Sequence[str]) -> _Truth:
        """Returns the result of a test; UNKNOWN if the script alone does not determine it."""
        words = [word for word in words if word not in ("[", "[[", "]", "]]", "test")]
        if any(f"{_MARK}?" in word for word in words):
            return _Truth.UNKNOWN
        answer: bool | int | None = None
        match [known_part(word) for word in words]:  # a variable that is not set is empty
            case ["!", *rest]:
                return ~self._test(rest)
            case [expression] if expression.startswith("(("):
                answer = self._arithmetic(expression[2:-2])
            case ["true" | "false" | ":" as command]:
                answer = command != "false"
            case ["-n" | "-z" as option, text]:
                answer = (text == "") is (option == "-z")
            case [left, "=" | "==" | "!=" as sign, right]:
                answer = fnmatchcase(left, right) is (sign != "!=")
            case [left, sign, right] if sign in _COMPARED:
                answer = self._arithmetic(f"{left or 0} {_COMPARED[sign]} {right or 0}")
        if answer is None:
            return _Truth.UNKNOWN
        return _Truth.YES if answer else _Truth.NO


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return int(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return int(_BINARY[type(sign)](_evaluate(left), _evaluate(right)))
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _BINARY:
            return int(_BINARY[type(sign)](_evaluate(left), _evaluate(right)))
        case ast.BoolOp(op=ast.And(), values=values):
            return int(all(map(_evaluate, values)))
        case ast.BoolOp(op=ast.Or(), values=values):
            return int(any(map(_evaluate, values)))
    raise ValueError
