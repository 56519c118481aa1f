// Names of attributes of Python objects.
#pragma once

#include <nanobind/nanobind.h>

namespace weft::bindings {

inline PyObject* interned(const char* text) {
  PyObject* made = PyUnicode_InternFromString(text);
  if (made == nullptr) throw nanobind::python_error();
  return made;
}

// Of attributes, made once: a look-up by them compares pointers.
struct Names {
  PyObject* acquire = interned("acquire");
  PyObject* bad_ids = interned("bad_ids");
  PyObject* begin = interned("begin");
  PyObject* busy = interned("_busy");
  PyObject* bytes_sent = interned("bytes_sent");
  PyObject* call = interned("call");
  PyObject* calls = interned("calls");
  PyObject* closed = interned("closed");
  PyObject* combine_s = interned("combine_s");
  PyObject* comm_closed = interned("_closed");
  PyObject* counters = interned("counters");
  PyObject* counts = interned("counts");
  PyObject* current_stream = interned("_cuda_getCurrentRawStream");
  PyObject* data = interned("data");
  PyObject* dispatch_s = interned("dispatch_s");
  PyObject* dtype = interned("dtype");
  PyObject* ended = interned("_ended");
  PyObject* epoch = interned("_epoch");
  PyObject* event = interned("event");
  PyObject* event_of_torch = interned("_event");
  PyObject* from_dlpack = interned("_from_dlpack");
  PyObject* half = interned("half");
  PyObject* handle = interned("handle");
  PyObject* has_refused = interned("_has_refused");
  PyObject* index = interned("index");
  PyObject* is_asleep = interned("_is_asleep");
  PyObject* is_captured = interned("is_captured");
  PyObject* is_ending = interned("is_ending");
  PyObject* last = interned("last");
  PyObject* last_handle = interned("last_handle");
  PyObject* lead = interned("lead");
  PyObject* made = interned("made");
  PyObject* names_ranges = interned("names_ranges");
  PyObject* native = interned("native");
  PyObject* native_comm = interned("_native");
  PyObject* new_empty_strided = interned("new_empty_strided");
  PyObject* num_combines = interned("num_combines");
  PyObject* num_dispatches = interned("num_dispatches");
  PyObject* num_local_experts = interned("num_local_experts");
  PyObject* num_tokens = interned("num_tokens");
  PyObject* overflow = interned("overflow");
  PyObject* pid = interned("pid");
  PyObject* pid_of_comm = interned("_pid");
  PyObject* release = interned("release");
  PyObject* rows_sent = interned("rows_sent");
  PyObject* scales = interned("scales");
  PyObject* sent = interned("sent");
  PyObject* stream = interned("_stream");
  PyObject* streams = interned("streams");
  PyObject* tie = interned("tie");
  PyObject* token = interned("token");
  PyObject* top_k = interned("top_k");
  PyObject* x = interned("x");
};

inline const Names& names() {
  static const Names all;
  return all;
}

}  // namespace weft::bindings
