#!/bin/sh
# install.sh: what the guide says of installing: make install and pkg-config, its CMake and its Meson lines, make dist,
# the Conan and the vcpkg recipe; and the programs of README and the guide, linked so, and the guide's commands for a
# microcontroller. What is not here is named and left out.
# CMAKE, MESON, PKG_CONFIG, CONAN: the programs.
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
build=${BUILD:-build}
case $build in /*) ;; *) build=$PWD/$build ;; esac
work=$build/install
cc=${CC:-cc}
make=$(command -v gmake || echo make)
rm -rf "$work"
mkdir -p "$work/project"

passed=0 failed=0
check() {                                                # a sentence, then a command that should succeed
  sentence=$1
  shift
  if "$@" >"$work/out" 2>&1; then passed=$((passed + 1)); return; fi
  failed=$((failed + 1))
  echo "failed: $sentence"
  sed 's/^/    /' "$work/out" | tail -n 12
}
have() { command -v "$1" >/dev/null 2>&1 || { echo "skipped: $1 is not here"; return 1; }; }
block() {
  awk -v kind="$1" '$0 == "```" kind { inside = 1; next } /^```/ { if (inside) exit } inside' "$root/examples/guide.md"
}

# the first of the examples, as a program that only includes luna.h
grep -v '^#define LUNA_IMPLEMENTATION' examples/1_attention.c >"$work/project/main.c"

# ---- make install, into a staging folder as packagers do, and into a prefix
check "make install" "$make" -s install BUILD="$build" PREFIX="$work/prefix"
check "make install DESTDIR" "$make" -s install BUILD="$build" DESTDIR="$work/stage" PREFIX=/usr
check "the same files" \
  [ "$(cd "$work/prefix" && find . -type f | sort)" = "$(cd "$work/stage/usr" && find . -type f | sort)" ]
check "luna.pc names the prefix" grep -q '^prefix=/usr$' "$work/stage/usr/lib/pkgconfig/luna.pc"
version=$(sed -n 's/^#define LUNA_VERSION "\(.*\)"/\1/p' luna.h)
if have "${PKG_CONFIG:-pkg-config}"; then
  pkg() { PKG_CONFIG_PATH=$work/prefix/lib/pkgconfig "${PKG_CONFIG:-pkg-config}" "$@" luna; }
  check "pkg-config knows the version" [ "$(pkg --modversion)" = "$version" ]
  flags=$(pkg --cflags --libs)
else
  flags="-I$work/prefix/include -L$work/prefix/lib -lluna -lm -lpthread"
fi
check "a program links the library" $cc "$work/project/main.c" $flags -o "$work/main"
check "and runs" "$work/main"

# ---- the programs of README and of the guide run, in their order: some read what others wrote, one what is in examples
mkdir "$work/run"
cp examples/luna_ops.h "$work/run"
ln -s "$root/examples" "$work/run/examples"
awk '/^```c$/ { inside = 1; text = ""; next }
     /^```/ {
       if (inside && text ~ /int main\(/) printf "%s", text > (folder "/program" 10 + count++ ".c")
       inside = 0; next
     }
     inside && !/^#define LUNA_IMPLEMENTATION/ { text = text $0 "\n" }' folder="$work/run" \
  "$root/README.md" "$root/examples/guide.md"
awk 'BEGIN {
  split("the moon and sun goes round a day , with night", w); split("good bad", label); split("splendid dreadful", own)
  for (i = 0; i < 400; i++) {
    line = label[i % 2 + 1] "\t"
    for (k = 0; k < 6 + i * 7 % 20; k++) {
      r = (r * 5 + i + k) % 997; line = line (k == i % 6 ? own[i % 2 + 1] : w[r % 10 + 1]) " "
    }
    print line
  }
}' >"$work/run/mine.tsv"
cd "$work/run" || exit 1
for program in program*.c; do
  check "$program is compiled" $cc -std=c99 -Wall -Wextra -Werror "$program" $flags -o "${program%.c}"
  check "$program runs" sh -c '"./$1" >"$1.out" || { cat "$1.out"; exit 1; }' - "${program%.c}"
done
check "the guide's encoder-decoder writes digits backwards" grep -q '^9 5 1 4 1 3 $' program*.out
check "README's first program writes 300 bytes" [ "$(wc -c <program10.out)" -ge 300 ]
ask=$(grep -l '"what a film"' program*.c)
asked() { "./${ask%.c}" "a splendid day" | grep -q '^good: [5-9][0-9]\.\|^good: 100'; }
check "it has learnt from a file" asked
[ ! -x "$build/classify" ] || check "build/classify reads its model" "$build/classify" eval mine.safetensors mine.tsv
cd "$root" || exit 1

# ---- make dist: the same bytes again, of what was unpacked and of a clone, and all that README points at
tarball=luna-$version.tar.gz
check "make dist" "$make" -s dist BUILD="$work/dist"
check "the tarball unpacks" tar -xzf "$work/dist/$tarball" -C "$work"
again() { "$make" -s -C "$1" dist BUILD="$work/again" && cmp "$work/dist/$tarball" "$work/again/$tarball"; }
check "what was unpacked makes the same tarball" again "$work/luna-$version"
if [ -n "$(git ls-files luna.h 2>/dev/null)" ] && [ -z "$(git status --porcelain)" ]; then
  check "a clone" git clone -q . "$work/clone"
  check "a clone makes the same tarball" again "$work/clone"
fi
points_at() {                                            # the pages' links to files, from where they stand
  for page in README.md examples/guide.md examples/measurements.md; do
    for path in $(awk '{ gsub(/\]\(/, "\n](") } 1' $page | sed -n 's/^](\([^):#]*\)[#)].*/\1/p'); do
      [ -e "$work/luna-$version/$(dirname $page)/$path" ] || { echo "$page: $path is not in the tarball"; return 1; }
    done
  done
}
check "what the pages point at is in the tarball" points_at
wrap=examples/packaging/meson/subprojects/luna.wrap
check "luna.wrap names $version" [ "$(grep -c "luna-$version\(.tar.gz\)*\$" $wrap)" = 2 ]
check "vcpkg.json names $version" grep -q "\"version\": \"$version\"" examples/packaging/vcpkg/luna/vcpkg.json
check "the guide names $tarball" grep -q "/$tarball " examples/guide.md

# ---- the guide's commands that bring a detector to a microcontroller, but the make before them
if [ -x "$build/export" ] && have arm-none-eabi-gcc && have qemu-system-arm; then
  cd "$work/luna-$version" || exit 1
  mkdir -p build && cp "$build/export" build
  awk '/^    build\/export examples\/models\/motions/ { on = 1 } on && !/^    / { exit } on' examples/guide.md >commands
  check "the guide's commands for a microcontroller" sh -c 'sh -e commands >seen 2>&1 || { cat seen; exit 1; }'
  check "which tell what the watch sees" grep -q '^line 48: Walking' seen
  cd "$root" || exit 1
fi

# ---- CMake: an installed one, which has been moved since; then the guide's lines with the tarball beside them
mv "$work/prefix" "$work/moved"
if have "${CMAKE:-cmake}"; then
  cmake=${CMAKE:-cmake}
  mkdir "$work/empty" "$work/versions"
  cp "$work/project/main.c" "$work/empty"
  block cmake >"$work/empty/CMakeLists.txt"
  configure() { env CC="$cc" "$cmake" -S "$work/empty" -B "$work/$1" -DCMAKE_BUILD_TYPE=Debug "$2"; }
  check "cmake configures" configure found -DCMAKE_PREFIX_PATH="$work/moved"
  check "cmake finds what was installed" \
    grep -q "^luna_DIR:PATH=$work/moved/lib/cmake/luna\$" "$work/found/CMakeCache.txt"
  check "cmake builds" "$cmake" --build "$work/found"
  check "its program runs" "$work/found/main"
  cp "$work/dist/$tarball" "$work/empty"
  check "cmake takes the tarball" configure fetched -DCMAKE_DISABLE_FIND_PACKAGE_luna=ON
  check "cmake builds it" "$cmake" --build "$work/fetched"
  check "its program runs" "$work/fetched/main"
  rm "$work/empty/$tarball"
  # of a version's requests those that Changes promises, and no others
  asks() {
    printf 'cmake_minimum_required(VERSION 3.13)\nproject(ask C)\nfind_package(luna %s CONFIG REQUIRED)\n' "$1" \
      >"$work/versions/CMakeLists.txt"
    rm -rf "$work/asked"
    env CC="$cc" "$cmake" -S "$work/versions" -B "$work/asked" -DCMAKE_PREFIX_PATH="$work/moved"
  }
  refuses() { ! asks "$1"; }
  for asked in "${version%%.*}.0" "$version EXACT"; do check "find_package(luna $asked)" asks "$asked"; done
  for asked in 0.2 "${version%.*}.99"; do check "find_package(luna $asked) fails" refuses "$asked"; done

fi

# ---- with TEST_FULL: vcpkg's port, with what vcpkg has for ports, as far as this one uses it; and Conan's recipe
if [ -n "$TEST_FULL" ] && command -v "${CMAKE:-cmake}" >/dev/null 2>&1; then
  cat >"$work/port.cmake" <<EOF
cmake_minimum_required(VERSION 3.18)
macro(run)
  execute_process(COMMAND \${ARGV} RESULT_VARIABLE status)
  if(status)
    message(FATAL_ERROR "\${ARGV}: \${status}")
  endif()
endmacro()
function(vcpkg_cmake_configure)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "SOURCE_PATH" "")
  run($cmake -S \${arg_SOURCE_PATH} -B $work/port -DCMAKE_BUILD_TYPE=Debug -DCMAKE_INSTALL_PREFIX=$work/packages)
endfunction()
function(vcpkg_cmake_install)
  run($cmake --build $work/port --target install)
endfunction()
function(vcpkg_cmake_config_fixup)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "CONFIG_PATH" "")
  file(RENAME $work/packages/\${arg_CONFIG_PATH} $work/packages/lib/cmake/fixed)
endfunction()
function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "FILE_LIST")
  file(COPY \${arg_FILE_LIST} DESTINATION $work/packages)
endfunction()
set(CURRENT_PACKAGES_DIR $work/packages)
include($root/examples/packaging/vcpkg/luna/portfile.cmake)
EOF
  check "vcpkg's port builds" env CC="$cc" "$cmake" -P "$work/port.cmake"
  check "cmake configures with vcpkg's package" configure port-user -Dluna_DIR="$work/packages/lib/cmake/fixed"
  check "cmake builds with vcpkg's package" "$cmake" --build "$work/port-user"
  check "its program runs" "$work/port-user/main"
  if have "${CONAN:-conan}"; then
    conan=${CONAN:-conan}
    export CONAN_HOME="$work/conan"
    check "conan profile" env -u CC "$conan" profile detect
    check "conan create" "$conan" create examples/packaging/conan -s build_type=Debug
    check "conan install" "$conan" install --requires="luna/$version" -s build_type=Debug -g CMakeDeps -of "$work/deps"
    check "cmake configures with Conan's package" configure conan-user -DCMAKE_PREFIX_PATH="$work/deps"
    check "cmake builds with Conan's package" "$cmake" --build "$work/conan-user"
    check "its program runs" "$work/conan-user/main"
  fi
fi

# ---- Meson: an installed one, by pkg-config; then the wrap
if have "${MESON:-meson}" && have ninja; then
  meson=${MESON:-meson}
  mkdir "$work/mine"
  cp "$work/project/main.c" "$work/mine"
  block meson >"$work/mine/meson.build"
  meson_runs() {
    env CC="$cc" PKG_CONFIG_PATH="$work/pc" "$meson" setup --buildtype=debug "$work/$1" "$work/mine" $2 &&
      "$meson" compile -C "$work/$1" && "$work/$1/main"
  }
  if have "${PKG_CONFIG:-pkg-config}"; then
    mkdir "$work/pc"
    sed "s,^prefix=.*,prefix=$work/moved," "$work/moved/lib/pkgconfig/luna.pc" >"$work/pc/luna.pc"
    check "Meson takes what was installed" meson_runs meson-found
  fi
  cp -r examples/packaging/meson/subprojects "$work/mine"
  cp "$work/dist/$tarball" "$work/mine/subprojects/packagefiles"
  check "Meson takes the tarball" meson_runs meson-wrap --force-fallback-for=luna
fi
echo "install: $passed passed, $failed failed"
[ "$failed" = 0 ]
