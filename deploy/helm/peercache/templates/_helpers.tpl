{{- define "peercache.name" -}}
{{- $own := default .Chart.Name .Values.nameOverride -}}
{{- if contains $own .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name $own | trunc 50 | trimSuffix "-" }}{{ end -}}
{{- end -}}

{{- define "peercache.selector" -}}
app.kubernetes.io/name: peercache
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "peercache.labels" -}}
{{ include "peercache.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "peercache.account" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "peercache.name" .) .Values.serviceAccount.name }}{{ else }}{{ default "default" .Values.serviceAccount.name }}{{ end -}}
{{- end -}}

{{- define "peercache.secret" -}}
{{- if eq .Values.tls.kind "certManager" }}{{ include "peercache.name" . }}-node{{ else }}{{ required "tls.secret: name the secret with tls.crt, tls.key and ca.crt, or set tls.kind to certManager, or to insecure for a trial" .Values.tls.secret }}{{ end -}}
{{- end -}}

{{/* A size such as 16Gi in MiB: templates cannot add quantities. */}}
{{- define "peercache.mebibytes" -}}
{{- if hasSuffix "Ti" . }}{{ mul (trimSuffix "Ti" . | int64) 1048576 }}
{{- else if hasSuffix "Gi" . }}{{ mul (trimSuffix "Gi" . | int64) 1024 }}
{{- else }}{{ trimSuffix "Mi" . | int64 }}{{ end -}}
{{- end -}}

{{/* The settings of every node: those that follow from the chart's values, then .Values.settings. */}}
{{- define "peercache.settings" -}}
{{- $name := include "peercache.name" . -}}
{{- $made := dict
    "listen" (printf ":%d" (int .Values.network.control))
    "data_port" (int .Values.network.data)
    "http_listen" (printf "0.0.0.0:%d" (int .Values.network.http))
    "http_open" .Values.httpOpen
    "home" (printf "ipc://%s/home.ipc" .Values.sharing.homePath)
    "shm_dir" .Values.sharing.shmPath
    "pool_size" (printf "%sB" .Values.poolSize)
    "log_format" "json" -}}
{{- if eq .Values.discovery.kind "kubernetes" }}
{{- $_ := set $made "discovery_addr" (list (printf "k8s://%s.%s:%d" $name .Release.Namespace (int .Values.network.control))) }}
{{- else }}
{{- $_ := set $made "discovery_addr" (list (printf "dns://%s.%s.svc:%d" $name .Release.Namespace (int .Values.network.control))) }}
{{- end }}
{{- $_ := set $made "cluster" .Values.tls.cluster }}
{{- if eq .Values.tls.kind "insecure" }}
{{- $_ := set $made "insecure" true }}
{{- else }}
{{- $_ := set $made "tls_ca" "/etc/peercache/tls/ca.crt" }}
{{- $_ := set $made "tls_cert" "/etc/peercache/tls/tls.crt" }}
{{- $_ := set $made "tls_key" "/etc/peercache/tls/tls.key" }}
{{- $_ := set $made "rdma_clear_text" .Values.rdma.clearText }}
{{- end }}
{{- if .Values.runAsUser }}
{{- /* Kubernetes gives the key's file to this group, and it must be one that shares the node. */}}
{{- $_ := set $made "share_group" (toString (int .Values.runAsUser)) }}
{{- end }}
{{- with .Values.shareUids }}
{{- $uids := list }}
{{- range . }}{{ $uids = append $uids (toString (int .)) }}{{ end }}
{{- $_ := set $made "share_uids" $uids }}
{{- end }}
{{- if ne .Values.hugepages.size "off" }}
{{- $_ := set $made "hugepages" .Values.hugepages.size }}
{{- $_ := set $made "hugepages_dir" .Values.hugepages.hostPath }}
{{- end }}
{{- if .Values.disk.enabled }}
{{- $_ := set $made "disk_enabled" true }}
{{- $_ := set $made "disk_path" .Values.disk.hostPath }}
{{- $_ := set $made "disk_size" (printf "%sB" .Values.disk.size) }}
{{- end }}
{{- range $key, $value := merge (deepCopy .Values.settings) $made }}
{{- if kindIs "float64" $value }}
{{- /* YAML's numbers are floats here; in TOML 3 and 3.0 differ. */}}
{{ $key }} = {{ if eq $value (floor $value) }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}
{{- else }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- end -}}
