"""Completion in bash: words of a command and folders together, and values behind `=`."""

from click.shell_completion import BashComplete, add_completion_class

SCRIPT = """\
%(complete_func)s() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
            dir,*) compopt -o filenames -o plusdirs ;;
            file,*) compopt -o default ;;
            plain,*) COMPREPLY+=("${line#plain,}") ;;
        esac
    done < <(
        IFS=$'\\n'
        env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" \\
            %(complete_var)s=bash_complete "$1"
    )
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class Bash(BashComplete):
    """Completion in bash.

    click's own script forgets the words that came before a folder, and offers folders only where
    there is no word.
    """

    source_template = SCRIPT

    def get_completion_args(self) -> tuple[list[str], str]:
        """Words before the cursor and the word at it; `--option=value` are three words in bash."""
        words, last = super().get_completion_args()
        if last != "=" and len(words) > 1 and words[-1] == "=" and words[-2].startswith("--"):
            words.pop()
        return words, last


def use_own_scripts() -> None:
    """Let click print the scripts of this module."""
    add_completion_class(Bash)
