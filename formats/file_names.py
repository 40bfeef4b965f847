"""Names of the files that lowbit writes beside the weights of a packed folder."""

from lowbit.formats.layout.manifest import MANIFEST_FILE
from lowbit.formats.tasks import TASKS_FILE

README = "README.md"
SOURCE_README = (
    "SOURCE_README.md"  # the original's README.md, renamed because the card takes its name
)
DRAFT = "MODEL_CARD.md"
QUALITY_FILE = "quality.json"
HTML_FILE = "quality.html"
BENCH_FILE = "bench.json"
CARDS = (README, DRAFT)  # files that a person may have edited
# Each is written whole under a temporary name, then renamed.
REPORT_FILES = frozenset({QUALITY_FILE, HTML_FILE, TASKS_FILE, BENCH_FILE, *CARDS})
# Files of these names in a source describe the source's weights and are not copied.
NEVER_PASSED = (MANIFEST_FILE, QUALITY_FILE, HTML_FILE, TASKS_FILE, BENCH_FILE, SOURCE_README)
