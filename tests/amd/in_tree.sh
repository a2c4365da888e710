#!/bin/sh
# in_tree.sh TREE COMMAND...: runs a command inside a Debian tree, with /proc, /dev, /tmp and this checkout at its own path. As root. The
# mounts live in a namespace of their own and end with the command.
set -eu
tree=$(readlink -f "$1")
shift
here=$(readlink -f "$(dirname "$0")/../..")
mkdir -p "$tree$here"
# With nvcc on PATH hipcc would call that, without a word.
exec unshare --mount --propagation private sh -eu -c '
tree=$0 here=$1 cwd=$2
shift 2
mount -t proc proc "$tree/proc"
mount --rbind /dev "$tree/dev"
mount --bind /tmp "$tree/tmp"
mount --bind "$here" "$tree$here"
exec chroot "$tree" /usr/bin/env -i HOME=/root LANG=C.UTF-8 TMPDIR=/tmp PATH=/usr/bin:/bin:/usr/sbin:/sbin HIP_PLATFORM=amd \
  sh -c "cd \"\$0\" 2>/dev/null || cd /; exec \"\$@\"" "$cwd" "$@"
' "$tree" "$here" "$PWD" "$@"
