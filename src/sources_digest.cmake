# Writes OUT, a C++ file with the SHA-256 of all that the native module is built from and kernels are compiled from: names and
# contents of the files below include/ and src/. cmake -DROOT=... -DOUT=... -P sources_digest.cmake
file(GLOB_RECURSE names RELATIVE "${ROOT}" "${ROOT}/include/weft/*" "${ROOT}/src/*.h" "${ROOT}/src/*.cc")
list(SORT names)
set(listing "")
foreach(name IN LISTS names)
  file(SHA256 "${ROOT}/${name}" digest)
  string(APPEND listing "${name} ${digest}\n")
endforeach()
string(SHA256 digest "${listing}")
file(WRITE "${OUT}" "#include \"bootstrap/build.h\"\n\nconst char weft::kSourcesDigest[65] = \"${digest}\";\n")
