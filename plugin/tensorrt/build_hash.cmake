# SPDX-License-Identifier: Apache-2.0
# cmake -DSOURCES="a.cpp;b.h" -DFOLDER=<folder that the names are relative to> -DOUTPUT=build_hash.h -P build_hash.cmake
#
# Writes a header with a hash of the sources' names and contents: the same for the same sources, wherever and whenever
# they are built, with git or without.
set(text "")
list(SORT SOURCES)
foreach(source IN LISTS SOURCES)
  file(SHA256 ${FOLDER}/${source} hash)
  string(APPEND text "${source} ${hash}\n")
endforeach()
string(SHA256 hash "${text}")
string(SUBSTRING ${hash} 0 12 hash)
file(WRITE ${OUTPUT}.new "#pragma once\ninline constexpr char kBuildHash[] = \"${hash}\";\n")
file(COPY_FILE ${OUTPUT}.new ${OUTPUT} ONLY_IF_DIFFERENT)
