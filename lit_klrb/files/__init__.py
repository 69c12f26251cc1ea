"""Files of runs and sweeps: read with bounds, written atomically, locked."""

from .folders import new_folder as new_folder, remove_abandoned as remove_abandoned
from .locks import claimed as claimed, one_at_a_time as one_at_a_time, try_lock as try_lock
from .paths import check_target as check_target, local_path as local_path
from .reading import (
    LARGEST as LARGEST,
    check_own as check_own,
    damage as damage,
    parse_object as parse_object,
    read_object as read_object,
    read_regular as read_regular,
    sha256 as sha256,
)
from .writing import (
    PARTIAL as PARTIAL,
    csv_text as csv_text,
    remove_unfinished as remove_unfinished,
    sync as sync,
    write_atomically as write_atomically,
    write_beside as write_beside,
    write_once as write_once,
    write_output as write_output,
)
